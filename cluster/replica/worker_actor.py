"""Ray's side of a tensor-parallel group: worker actors for ranks 1..N-1, beside the driver worker in the replica."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.replica.orphans import watch_parent
from cluster.telemetry.logs import log_to_stderr
from engine.errors import EngineDeadError
from engine.worker.runner import START_TIMEOUT
from parallel.memory_deaths import MemoryDeaths

LogAs = Callable[[int], Mapping[str, str | int] | None]  # rank -> fields


class WorkerActor:
    """One rank in a process of its own, placed by Ray. Runs the engine's worker loop until the driver lets go.

    log_fields: of the JSON lines that it logs to standard error; None = it logs as Python does.
    """

    def __init__(self, log_fields: Mapping[str, str | int] | None = None) -> None:
        if log_fields is not None:
            log_to_stderr(log_fields)
        watch_parent()

    def identity(self) -> tuple[str, int]:
        """Return (node id, process id), so that the driver can end a worker that no longer answers."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Block in `target(*args)`, the rank's whole life."""
        target(*args)


class RayGang:
    """The worker actors of one replica. Gangs live and die together.

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
