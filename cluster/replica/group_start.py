"""Forms a replica's tensor-parallel group: the driver worker in this process, the other ranks as Ray actors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.util import get_current_placement_group

from cluster.config import ClusterConfig
from cluster.replica.rank_main import RankOf, rank_main
from cluster.replica.worker_actor import LogAs, RayGang
from cluster.telemetry.logs import JSON
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loader.model_folder import ModelFolder
from engine.worker.executor import Executor
from engine.worker.executor_start import ModelInfo, OnPhase, build_executor, drive_gang, prepare_model
from parallel.rendezvous import Rendezvous
from parallel.ring import SharedMemoryRing

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that is ready for its first step. `gang` is None for a group of one."""

    executor: Executor
    info: ModelInfo
    gang: RayGang | None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return (os.getpid(), *(self.gang.pids if self.gang else ()))


def start_group(config: ClusterConfig, on_phase: OnPhase = lambda _: None, replica_id: str = "") -> StartedGroup:
    """Load the model on all ranks. on_phase: told each phase as it begins. replica_id: names it in figures and logs.

    Raises `ConfigError`, `CheckpointError`, or `EngineDeadError` when a rank did not come up.
    """
    _check_link_host(config.link_host)
    if config.tensor_parallel_size == 1:
        executor, info = build_executor(config.engine, on_phase)
        return StartedGroup(executor, info, None)
    folder, engine = prepare_model(config.engine, on_phase)
    placement = get_current_placement_group()
    if placement is None:
        raise ConfigError(
            "tensor_parallel_size above 1 needs a placement group with one bundle per rank; deploy with "
            "cluster.app:build, which asks for it",
            "tensor_parallel_size",
        )
    on_phase("workers")
    gang = RayGang(placement, tuple(placement.bundle_specs), log_as=_log_as(config, replica_id))
    of = RankOf(config.model_id, replica_id, config.metrics_compat is not None)
    return _start_gang(gang, folder, engine, config, of, on_phase)


def _log_as(config: ClusterConfig, replica_id: str) -> LogAs:
    """Return how a rank logs: with which fields, None where it leaves that to Python."""
    if config.log_format != JSON:
        return lambda _: None
    return lambda rank: {"replica": replica_id, "rank": rank, "model": config.model_id}


def _start_gang(
    gang: RayGang,
    folder: ModelFolder,
    engine: EngineConfig,
    config: ClusterConfig,
    of: RankOf,
    on_phase: OnPhase,
) -> StartedGroup:
    size = engine.tensor_parallel_size
    here = ray.get_runtime_context().get_node_id()
    try:
        rendezvous = Rendezvous.create(listening_host(config, gang.nodes))
        same_host = all(node == here for node in gang.nodes)
        ring = SharedMemoryRing.create(readers=size - 1) if same_host else None
    except BaseException:
        gang.kill()
        raise
    handle = ring.name if ring else None
    gang.start(rank_main, lambda rank: (of, engine, rank, size, rendezvous.address, handle))
    executor, info = drive_gang(engine, folder, rendezvous, ring, gang, on_phase)
    return StartedGroup(executor, info, gang)


def listening_host(config: ClusterConfig, nodes: Iterable[str]) -> str:
    """Return where this process listens for peers on `nodes`: as configured, else loopback if all are on its own."""
    if config.link_host is not None:
        return config.link_host
    here = ray.get_runtime_context().get_node_id()
    return LOOPBACK if all(node == here for node in nodes) else str(ray.util.get_node_ip_address())


def _check_link_host(host: str | None) -> None:
    """Raise `ConfigError` now if nobody could ever link up with this replica."""
    if host is None:
        return
    try:
        family, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        raise ConfigError(
            f"link_host: cannot listen on {host!r} ({error}); leave it out, or give an address of each node",
            "link_host",
        ) from error
