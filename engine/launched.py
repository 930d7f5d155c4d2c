"""Steps on their way to the device: how they get there, and what must be remembered until they are taken in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineDeadError, StepMemoryError
from engine.executor import Executor, Pending
from engine.holds import Hold
from engine.inputs import InputBuilder
from engine.report import SamplingInputs, StepInputs
from engine.request import Sequence
from engine.schedule import Schedule
from engine.scheduler import Scheduler


@dataclass(slots=True)
class Launched:
    """One step on its way. Times are seconds on the engine's clock.

    planned_at / launched_at: when its planning began, and when it was given to the device. tried: seconds spent on
    attempts for which there was no memory. tainted: what it computes must not be found by others, for the cache was
    cleared since it was planned.
    """

    schedule: Schedule
    pending: Pending
    wants_logprobs: bool
    planned_at: float
    launched_at: float
    tried: float = 0.0
    tainted: bool = False


class Launcher:
    """Schedules steps, prepares their inputs and gives them to the executor."""

    def __init__(
        self, scheduler: Scheduler, inputs: InputBuilder, executor: Executor, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._inputs = inputs
        self._executor = executor
        self._clock = clock

    def launch(self) -> Launched | None:
        """Launch the next step; None where there is nothing to compute, or not yet.

        Where there is no memory for a step, it waits for the one that runs; if none does, its newest request is shed.

        Raises `EngineDeadError` when the executor failed.
        """
        planned_at, tried = self._clock(), 0.0
        while (planned := self._plan()) is not None:
            schedule, inputs, sampling = planned
            began = self._clock()
            try:
                pending = self._executor.launch(inputs, sampling)
            except StepMemoryError as error:
                if self._scheduler.is_ahead:
                    self._scheduler.hold(Hold.MEMORY)
                    return None
                tried += self._clock() - began
                newest = max(schedule.sequences, key=lambda sequence: (sequence.arrival_time, sequence.order))
                self._scheduler.fail(newest, error)
            except EngineDeadError:
                raise
            except Exception as error:
                raise EngineDeadError(f"the executor failed: {error}") from error
            else:
                self._scheduler.advance(schedule)
                return Launched(schedule, pending, sampling.num_logprobs >= 0, planned_at, began, tried)
        return None

    def _plan(self) -> tuple[Schedule, StepInputs, SamplingInputs] | None:
        """Schedule and prepare. A request whose inputs cannot be made is failed, and the others scheduled again."""
        while (schedule := self._scheduler.schedule()) is not None:
            try:
                return schedule, *self._inputs.prepare(schedule)
            except Exception:
                if not self._fail_culprits(schedule):
                    raise
        return None

    def _fail_culprits(self, schedule: Schedule) -> bool:
        """Prepare each row on its own and fail those that raise. False if none does."""
        culprits: list[tuple[Sequence, Exception]] = []
        for row, sequence in enumerate(schedule.sequences):
            try:
                self._inputs.prepare(schedule.alone(row))
            except Exception as error:
                culprits.append((sequence, error))
        for sequence, culprit_error in culprits:
            self._scheduler.fail(sequence, culprit_error)
        return bool(culprits)
