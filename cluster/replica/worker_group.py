"""A replica's tensor-parallel group under Ray: the driver worker in this process, the other ranks as actors."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch
from prometheus_client.core import Metric
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.lifecycle.leases import listening_host
from cluster.replica.orphans import watch_raylet
from cluster.telemetry.families import FAMILIES, Source
from cluster.telemetry.logs import JSON, log_to_stderr
from cluster.telemetry.publishing import Publishing, RayPublisher, publish_period
from cluster.telemetry.samples import Histogram, Labels, family_of, histogram_of
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from engine.loader.checkpoint import ModelFolder
from engine.report import RankTimes
from engine.worker.executor import Executor
from engine.worker.executor_start import ModelInfo, build_executor, drive_worker_group, prepare_model
from engine.worker.runner import START_TIMEOUT, OnPhase, no_phases
from engine.worker.worker import worker_main
from parallel.launcher import MemoryDeaths
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous, RendezvousAddress

_WAIT, _FORWARD = "rank_channel_wait_seconds", "rank_forward_seconds"
LogAs = Callable[[int], Mapping[str, str | int] | None]  # rank -> fields


def take_threads() -> None:
    """Compute with as many threads as Ray has said, also where torch was loaded before Ray said it."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal():
        torch.set_num_threads(int(told))


class WorkerActor:
    """One rank in a process of its own, placed by Ray. Runs the engine's worker loop until the driver lets go.

    log_fields: of the JSON lines that it logs to standard error; None = it logs as Python does.
    """

    def __init__(self, log_fields: Mapping[str, str | int] | None = None) -> None:
        if log_fields is not None:
            log_to_stderr(log_fields)
        watch_raylet()
        take_threads()

    def identity(self) -> tuple[str, int]:
        """Return (node id, process id), so that the driver can end a worker that no longer answers."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Block in `target(*args)`, the rank's whole life."""
        target(*args)


class RayWorkerGroup:
    """The worker actors of one replica. They live and die together.

    bundles: resources of each rank's bundle; actor i sits in bundle i of `group`. timeout: seconds in which all
    actors must have answered. log_as: fields of what a rank logs (see `WorkerActor`). Raises `EngineDeadError` naming
    the rank that did not come up; none is left then.
    """

    def __init__(
        self,
        group: PlacementGroup,
        bundles: tuple[dict[str, float], ...],
        timeout: float = START_TIMEOUT,
        log_as: LogAs = lambda _: None,
    ) -> None:
        self._memory = MemoryDeaths()
        actor = ray.remote(WorkerActor)
        self._workers = [
            actor.options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                # The loop blocks one thread for good; the other answers `identity`.
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(log_as(rank))
            for rank, bundle in enumerate(bundles)
            if rank > 0
        ]
        try:
            self._identities = self._identify(timeout)
        except BaseException:
            for worker in self._workers:
                ray.kill(worker, no_restart=True)
            raise
        self._runs: list[ray.ObjectRef[None]] = []

    @property
    def nodes(self) -> list[str]:
        """Node ids of ranks 1..N-1."""
        return [node for node, _ in self._identities]

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1..N-1, each on its own node."""
        return [pid for _, pid in self._identities]

    def start(self, target: Callable[..., None], args_of_rank: Callable[[int], tuple[Any, ...]]) -> None:
        """Run `target(*args_of_rank(rank))` on every worker."""
        self._runs = [
            worker.run.remote(target, args_of_rank(rank)) for rank, worker in enumerate(self._workers, start=1)
        ]

    def check(self) -> None:
        """Raise `EngineDeadError` with the reason when any rank has ended."""
        done, _ = ray.wait(self._runs, num_returns=1, timeout=0) if self._runs else ([], [])
        for ref in done:
            rank = self._runs.index(ref) + 1
            try:
                ray.get(ref)
            except Exception as error:
                raise EngineDeadError(f"rank {rank} ended: {_first_line(error)}{self._suspicion(rank)}") from error
            raise EngineDeadError(f"rank {rank} ended without being asked to")

    def _suspicion(self, rank: int) -> str:
        """Return whether memory may have been the reason, as far as this node knows."""
        here = self.nodes[rank - 1] == ray.get_runtime_context().get_node_id()
        return self._memory.suspicion() if here else ""

    def wait_for_death(self) -> None:
        """Block until any rank ends, then raise like `check`."""
        ray.wait(self._runs, num_returns=1, timeout=None)
        self.check()

    def kill(self) -> None:
        """End all workers at once, those that no longer answer (stopped, hung in a collective) included."""
        here = ray.get_runtime_context().get_node_id()
        for worker, (node, pid) in zip(self._workers, self._identities, strict=True):
            if node == here:
                _kill_process(pid)
            ray.kill(worker, no_restart=True)

    def _identify(self, timeout: float) -> list[tuple[str, int]]:
        answers = [worker.identity.remote() for worker in self._workers]
        _, late = ray.wait(answers, num_returns=len(answers), timeout=timeout)
        for rank, answer in enumerate(answers, start=1):
            if answer in late:
                raise EngineDeadError(
                    f"rank {rank} was not started within {timeout:g} s: no room for its actor in bundle {rank} of "
                    "the placement group, or its process does not answer"
                )
        return [_identity(rank, answer) for rank, answer in enumerate(answers, start=1)]


def _identity(rank: int, answer: ray.ObjectRef[tuple[str, int]]) -> tuple[str, int]:
    try:
        return ray.get(answer)
    except RayError as error:
        raise EngineDeadError(f"rank {rank} died while it was started: {_first_line(error)}") from error


def _kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RankMetrics:
    """Fed with the times of every step, on the thread that runs them; `collect` is called on another."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._waited = Histogram(FAMILIES[_WAIT].buckets)
        self._ran = Histogram(FAMILIES[_FORWARD].buckets)

    def note(self, times: RankTimes) -> None:
        """Count one step."""
        self._waited.observe(times.waited)
        self._ran.observe(times.ran)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of this rank."""
        yield histogram_of(_WAIT, (self._model_name,), self._waited)
        yield histogram_of(_FORWARD, (self._model_name,), self._ran)
        yield memory_metric(self._model_name)


def memory_metric(model_name: str) -> Metric:
    """Return the bytes that this process holds: of the host's memory, and on its GPU where it uses one."""
    held: dict[Labels, float] = {(model_name, "host"): psutil.Process().memory_info().rss}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        held[model_name, "device"] = torch.cuda.memory_reserved()
    return family_of("rank_memory_bytes", held)


@dataclass(frozen=True, slots=True)
class RankOf:
    """Whose rank it is. vllm: whether figures go by vLLM's names as well."""

    model_name: str
    replica: str
    vllm: bool = False


def rank_main(
    of: RankOf,
    config: EngineConfig,
    rank: int,
    size: int,
    rendezvous_address: RendezvousAddress,
    channel_handle: str | None,
) -> None:
    """Be a rank as `engine.worker.worker.worker_main` says, and publish its figures through Ray."""
    figures = RankMetrics(of.model_name)
    own = {"replica": of.replica, "rank": str(rank)}
    publishing = Publishing(figures.collect, RayPublisher((Source.RANK,), own, of.vllm), publish_period())
    publishing.start()
    try:
        worker_main(config, rank, size, rendezvous_address, channel_handle, figures.note)
    finally:
        publishing.stop()


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that is ready for its first step. `workers` is None for a group of one."""

    executor: Executor
    info: ModelInfo
    workers: RayWorkerGroup | None

    @property
    def nodes(self) -> frozenset[str]:
        """Ids of the nodes that its ranks run on."""
        return frozenset({ray.get_runtime_context().get_node_id(), *(self.workers.nodes if self.workers else ())})

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return (os.getpid(), *(self.workers.pids if self.workers else ()))


def start_group(config: ClusterConfig, on_phase: OnPhase = no_phases, replica_id: str = "") -> StartedGroup:
    """Load the model on all ranks. on_phase: called as each phase begins. replica_id: its name in metrics and logs.

    Raises `ConfigError`, `CheckpointError`, or `EngineDeadError` when a rank did not come up.
    """
    _check_link_host(config.link_host)
    take_threads()
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
    workers = RayWorkerGroup(placement, tuple(placement.bundle_specs), log_as=_log_as(config, replica_id))
    of = RankOf(config.model_id, replica_id, config.metrics_compat is not None)
    return _start_workers(workers, folder, engine, config, of, on_phase)


def _log_as(config: ClusterConfig, replica_id: str) -> LogAs:
    """Return how a rank logs: with which fields, None where it leaves that to Python."""
    if config.log_format != JSON:
        return lambda _: None
    return lambda rank: {"replica": replica_id, "rank": rank, "model": config.model_id}


def _start_workers(
    workers: RayWorkerGroup,
    folder: ModelFolder,
    engine: EngineConfig,
    config: ClusterConfig,
    of: RankOf,
    on_phase: OnPhase,
) -> StartedGroup:
    size = engine.tensor_parallel_size
    here = ray.get_runtime_context().get_node_id()
    try:
        rendezvous = Rendezvous.create(listening_host(config.link_host, workers.nodes))
        same_host = all(node == here for node in workers.nodes)
        ring = SharedMemoryRing.create(readers=size - 1) if same_host else None
    except BaseException:
        workers.kill()
        raise
    handle = ring.name if ring else None
    workers.start(rank_main, lambda rank: (of, engine, rank, size, rendezvous.address, handle))
    executor, info = drive_worker_group(engine, folder, rendezvous, ring, workers, on_phase)
    return StartedGroup(executor, info, workers)


def _check_link_host(host: str | None) -> None:
    """Raise `ConfigError` now if no router could open a link to this replica."""
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
