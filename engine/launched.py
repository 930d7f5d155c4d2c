"""Steps on their way to the device: how they get there, and what must be remembered until they are taken in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineDeadError, IntegrityError, ScoresMemoryError, StepMemoryError
from engine.inputs.prepare import InputBuilder
from engine.report import Ints, SamplingInputs, StepInputs, StepOutputs
from engine.request import Request, Sequence
from engine.scheduler.holds import Hold
from engine.scheduler.schedule import Schedule
from engine.scheduler.scheduler import Scheduler
from engine.step_results import find_fault
from engine.worker.executor import Executor, Pending

OnBegin = Callable[[list[Request]], None]


@dataclass(slots=True)
class Launched:
    """One step on its way. Times are seconds on the engine's clock.

    planned_at / launched_at: when its planning began, and when it was given to the device. tried: seconds spent on
    attempts for which there was no memory. tainted: what it computes must not be found by others, for the cache was
    cleared since it was planned. outputs: once they were waited for. ran_before: when the step before it had run.
    """

    schedule: Schedule
    pending: Pending
    wants_logprobs: bool
    planned_at: float
    launched_at: float
    tried: float = 0.0
    tainted: bool = False
    outputs: StepOutputs | None = None
    ran_before: float = 0.0


class InFlight:
    """The step that the device has between calls of `EngineCore.step`, and the wait for its results.

    step: None where it has none. ran_at: when the last step that was waited for had run, on the engine's clock.
    Masks that wait for tokens hold this and not the engine, which would keep itself alive through them.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        self.step: Launched | None = None
        self.ran_at = clock()
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def is_wanted(self) -> bool:
        """Whether the device has a step that somebody waits for."""
        return self.step is not None and not self.step.schedule.is_unwanted

    def tokens(self) -> Ints:
        """Wait for the tokens of the step. Raises `EngineDeadError` as `results` does."""
        if self.step is None:
            raise IntegrityError("tokens are wanted of a step that nobody launched")
        return self.results(self.step).token_ids

    def results(self, launched: Launched) -> StepOutputs:
        """Wait for a step's results, or return those that were waited for before.

        Raises `EngineDeadError` when the executor failed, or what it returned cannot be of that step.
        """
        if launched.outputs is not None:
            return launched.outputs
        try:
            outputs = launched.pending.result()
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineDeadError(f"the executor failed: {error}") from error
        launched.ran_before, self.ran_at = self.ran_at, self._clock()
        fault = find_fault(outputs, len(launched.schedule.samples), launched.wants_logprobs, self._vocab_size)
        if fault is not None:
            raise EngineDeadError(fault)
        launched.outputs = outputs
        return outputs


class Launcher:
    """Schedules steps, prepares their inputs and gives them to the executor.

    on_begin: told the requests that a step computes something for, and none before it did, before it is run.
    """

    def __init__(
        self, scheduler: Scheduler, inputs: InputBuilder, executor: Executor, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._inputs = inputs
        self._executor = executor
        self._clock = clock
        self.on_begin: OnBegin = lambda _: None

    def launch(self) -> Launched | None:
        """Launch the next step; None where there is nothing to compute, or not yet.

        Where there is no memory for a step, it waits for the one that runs; if none does, a request is shed: the
        newest of those whose prompt is to get log-probabilities, which take the most, else the newest of all.

        Raises `EngineDeadError` when the executor failed.
        """
        planned_at, tried = self._clock(), 0.0
        while (planned := self._plan()) is not None:
            schedule, inputs, sampling = planned
            if begun := self._scheduler.take_begun():
                self.on_begin(begun)
            began = self._clock()
            try:
                pending = self._executor.launch(inputs, sampling)
            except StepMemoryError as error:
                if self._scheduler.is_ahead:
                    self._scheduler.hold(Hold.MEMORY)
                    return None
                tried += self._clock() - began
                self._shed(schedule, error)
            except EngineDeadError:
                raise
            except Exception as error:
                raise EngineDeadError(f"the executor failed: {error}") from error
            else:
                self._scheduler.advance(schedule)
                return Launched(schedule, pending, sampling.num_logprobs >= 0, planned_at, began, tried)
        return None

    def _shed(self, schedule: Schedule, error: StepMemoryError) -> None:
        scored = [sequence for sequence, _, _ in schedule.scores]
        newest = max(scored or schedule.sequences, key=lambda sequence: (sequence.arrival_time, sequence.order))
        self._scheduler.fail(newest, ScoresMemoryError(str(error)) if scored else error)

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
