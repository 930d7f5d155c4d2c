"""The Ray cluster under the app: one of this command's own, or one that was there before."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import nullcontext, suppress

import psutil
import ray

from cluster.resources import AppResources
from deploy.cli.processes import Interrupts, adopt_orphans, kill_all
from deploy.serve.address import knock
from deploy.serve.environment import OBJECT_STORE_BYTES, Environment
from deploy.serve.fork_server import ForkServer
from deploy.serve.lean_ray import lean_node
from engine.device.machine import cores
from engine.errors import ConfigError, SquadronError

EXIT_SECONDS = 5.0
START_SECONDS = 180.0  # a machine with 40 processes for 2 cores took 62
JOIN_SECONDS = 30.0  # a busy machine takes five
RETRY_SECONDS = 0.5
RAY_PROCESSES = ("gcs_server", "raylet")  # names begin so, children of who started Ray


class RayStartError(SquadronError):
    """A Ray of our own did not come up; one sentence says why."""


class RayCluster(ABC):
    """A connection to a Ray cluster. `about` says in a few words which."""

    about: str

    @abstractmethod
    def alive(self) -> bool:
        """Whether the cluster can still be asked; cheap, and never blocks."""

    @abstractmethod
    def stop(self) -> None:
        """Leave the cluster, and end what was started with it. Can be called twice."""


class LocalRay(RayCluster):
    """A Ray of our own on loopback, with as many logical CPUs as the app asks for.

    forks: has its workers forked, and ends with it; None = Ray starts them. taken: ports that somebody else will use.
    Must be made in the main thread: Linux ends the processes with the thread that started them. One that does not
    start is tried a second time. Raises `RayStartError`.
    """

    def __init__(
        self,
        cpus: float,
        verbose: bool,
        interrupts: Interrupts,
        forks: ForkServer | None = None,
        taken: Collection[int] = (),
    ) -> None:
        self._interrupts = interrupts
        self._forks = forks
        if forks is not None:
            interrupts.removes(forks.folder)
        adopt_orphans()
        logical = max(cores(), math.ceil(cpus))
        try:
            self._start(logical, verbose, taken)
        except Exception as error:
            print(f"Ray did not start, and is tried once more: {_first_line(error)}", file=sys.stderr, flush=True)
            try:
                self._start(logical, verbose, taken)
            except Exception as again:
                raise RayStartError(f"Ray did not start: {_first_line(again)} ({_logs()})") from again
        shared = f", of which Ray makes {logical} CPUs, as many as the processes ask for" if logical > cores() else ""
        self.about = f"on this machine of {count(cores(), 'core')}{shared}"

    def _start(self, logical: int, verbose: bool, taken: Collection[int]) -> None:
        late = f"Ray did not start within {START_SECONDS:g} s; start again with less other work here ({_logs()})"
        forked = nullcontext() if self._forks is None else self._forks.forks()
        try:
            with self._interrupts.within(START_SECONDS, late), lean_node(os.environ, verbose, taken), forked:
                ray.init(
                    address="local",
                    num_cpus=logical,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=verbose,
                    logging_level=logging.INFO if verbose else logging.ERROR,
                )
        except BaseException as error:
            if isinstance(error, Exception):
                self._end(0.0)
            elif self._forks is not None:
                self._forks.close()
            self._forks = None  # it ends with the node that it was to fork for
            raise

    def alive(self) -> bool:
        """Whether Ray's control store and its node's own process still run: no app is deleted without either."""
        running: set[str] = set()
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # an idle worker that has just ended
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.add(process.name())
        return all(any(name.startswith(needed) for name in running) for needed in RAY_PROCESSES)

    def stop(self) -> None:
        """End Ray and make sure that none of its processes outlives the command."""
        self._end(EXIT_SECONDS)

    def _end(self, grace: float) -> None:
        """End Ray; after `grace` seconds what is left of it is killed."""
        started = self._interrupts.started()
        ray.shutdown()
        if self._forks is not None:
            self._forks.close()
        _, alive = psutil.wait_procs(started, timeout=grace)
        kill_all(alive)


def check_capacity(placement: AppResources, free: dict[str, float], total: dict[str, float]) -> None:
    """Raise `ConfigError` with the numbers when the app does not fit. `free`, `total`: Ray's resources by kind."""
    ranks = [f"{count(one.replicas, 'replica')} x {count(len(one.bundles), 'rank')}" for one in placement.models]
    on_cpus = [f"{text} x {one.bundles[0]['CPU']:g}" for text, one in zip(ranks, placement.models, strict=True)]
    beside = [count(placement.routers, "router")]
    if placement.gateways:
        beside.append(count(placement.gateways, "gateway"))
    *most, last = [*on_cpus, *beside]
    needs = (
        ("GPU", placement.gpus, f"{', '.join(ranks)} need {placement.gpus:g}", "or run on CPUs with --device cpu"),
        (
            "CPU",
            placement.cpus,
            f"{', '.join(most)} and {last} need {placement.cpus:g}",
            "or lower --cpus-per-worker",
        ),
    )
    for kind, needed, why, otherwise in needs:
        if needed > free.get(kind, 0.0):
            raise ConfigError(
                f"Ray has {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}s free, but {why}; "
                f"lower --replicas or --tensor-parallel-size, {otherwise}, or add nodes (--wait-for-nodes)",
                "replicas",
            )


def count(number: int, noun: str) -> str:
    """Return `1 replica`, `2 replicas`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class JoinedRay(RayCluster):
    """A cluster that was there before and stays. Raises `ConfigError` when it cannot be reached, tried twice."""

    def __init__(self, address: str, verbose: bool, interrupts: Interrupts) -> None:
        late = _problem(address, f"no answer in {JOIN_SECONDS:g} s")
        try:
            with interrupts.within(JOIN_SECONDS, late):
                try:
                    _join(address, verbose)
                except (OSError, RuntimeError):
                    ray.shutdown()
                    time.sleep(RETRY_SECONDS)
                    _join(address, verbose)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(_problem(address, _first_line(error)), "address") from error
        self.about = f"joined {address}, {count(len(ray.nodes()), 'node')}"

    def alive(self) -> bool:
        """The cluster is not ours to judge."""
        return True

    def stop(self) -> None:
        """Disconnect."""
        ray.shutdown()


def _join(address: str, verbose: bool) -> None:
    knock(address)
    ray.init(address=address, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR)


def _logs() -> str:
    return f"its logs have more: raylet.err and gcs_server.err in {Environment.read().ray_logs}"


def _problem(address: str, why: str) -> str:
    return f"RAY_ADDRESS={address} cannot be joined ({why}); unset it to start Ray here"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
