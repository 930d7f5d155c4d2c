"""The Ray cluster under the app: started on this machine for the life of the command."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from abc import ABC, abstractmethod

import psutil
import ray

from cluster.placement import AppPlacement
from deploy.serve.environment import OBJECT_STORE_BYTES
from deploy.serve.orphans import OrphanWatch
from engine.device.machine import cores
from engine.errors import ConfigError

EXIT_SECONDS = 5.0
RAY_PROCESSES = ("gcs_server", "raylet")  # names begin so, children of who started Ray
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


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

    Must be made in the main thread: Linux ends Ray's processes with the thread that started them.
    """

    def __init__(self, cpus: float, verbose: bool) -> None:
        self._watch = OrphanWatch()
        _adopt_orphans()
        logical = max(cores(), math.ceil(cpus))
        ray.init(
            address="local",
            num_cpus=logical,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
        )
        self._watch.guard(descendants())
        self.about = f"on this machine, {logical} logical CPUs"

    def alive(self) -> bool:
        """Whether Ray's control store and its node's own process still run: no app is deleted without either."""
        running = {
            process.name() for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE
        }
        return all(any(name.startswith(needed) for name in running) for needed in RAY_PROCESSES)

    def stop(self) -> None:
        """End Ray and make sure that none of its processes outlives the command."""
        self._watch.close()
        started = descendants()
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=EXIT_SECONDS)
        kill_all(alive)


def check_capacity(placement: AppPlacement, free: dict[str, float], total: dict[str, float]) -> None:
    """Raise `ConfigError` with the numbers when the app does not fit. `free`, `total`: Ray's resources by kind."""
    ranks = [f"{count(one.replicas, 'replica')} x {count(len(one.bundles), 'rank')}" for one in placement.models]
    on_cpus = [f"{text} x {one.bundles[0]['CPU']:g}" for text, one in zip(ranks, placement.models, strict=True)]
    routers = count(placement.routers, "router")
    needs = (
        ("GPU", placement.gpus, f"{', '.join(ranks)} need {placement.gpus:g}", "or run on CPUs with --device cpu"),
        (
            "CPU",
            placement.cpus,
            f"{', '.join(on_cpus)} and {routers} need {placement.cpus:g}",
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


def descendants() -> list[psutil.Process]:
    """Return every process that this one started, theirs included."""
    return psutil.Process().children(recursive=True)


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL those that still run."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that `descendants` never loses one (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
