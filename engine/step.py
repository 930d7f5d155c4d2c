"""One step from its launch to its results: what goes to the device, what waits for it, and what the results hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from engine.errors import (
    EngineDeadError,
    IntegrityError,
    InvalidRequestError,
    PoisonedLogitsError,
    ScoresMemoryError,
    StepMemoryError,
)
from engine.inputs.prepare import InputBuilder
from engine.report import (
    Floats,
    Ints,
    Logprobs,
    PromptLogprobs,
    SamplingInputs,
    StepInputs,
    StepOutputs,
    StepReport,
    TokenLogprob,
)
from engine.request import Request, Sequence
from engine.sampling_params import SamplingParams
from engine.scheduler.schedule import Hold, Schedule
from engine.scheduler.scheduler import Scheduler
from engine.worker.executor import Executor, Pending

Fail = Callable[[Sequence, Exception], None]

INT32, UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


def is_poisoned(outputs: StepOutputs) -> bool:
    """Whether the model gave NaN or infinity for any sequence of the step."""
    scored, pooled = outputs.prompt_logprobs, outputs.pooled
    if outputs.failed or (scored is not None and np.isnan(scored.chosen).any()):
        return True
    return pooled is not None and not np.isfinite(pooled).all()


def take_prompt_logprobs(schedule: Schedule, outputs: StepOutputs, fail: Fail) -> list[PromptLogprobs]:
    """Return the step's prompt log-probabilities by sequence; `fail` gets those that are NaN or missing.

    Call once per step, before the step's sequences are updated.
    """
    found = outputs.prompt_logprobs
    if found is None:
        for sequence, _, _ in schedule.scores:
            if sequence not in schedule.gone:
                fail(sequence, ScoresMemoryError("there was no memory for the log-probabilities of its prompt"))
        return []
    scored: list[PromptLogprobs] = []
    start = 0
    for sequence, first, beyond in schedule.scores:
        rows = range(start, start + beyond - first)
        start = rows.stop
        if sequence in schedule.gone:
            continue
        try:
            scored.append(_prompt_logprobs(sequence, first, beyond, found, rows))
        except Exception as error:
            fail(sequence, error)
    return scored


def take_pooled(schedule: Schedule, outputs: StepOutputs, fail: Fail) -> list[tuple[Sequence, Floats]]:
    """Add what the step pooled to its sequences; return the vectors, [hidden] fp32, of those that are complete.

    `fail` gets those that are not finite. Call once per step, before the step's sequences are updated.
    """
    done: list[tuple[Sequence, Floats]] = []
    if outputs.pooled is None:
        return done
    for (sequence, row), state in zip(schedule.pooled, outputs.pooled, strict=True):
        if sequence in schedule.gone:
            continue
        try:
            _add(sequence, state, starts=not int(schedule.num_computed[row]))
        except Exception as error:
            fail(sequence, error)
            continue
        if sequence.pooled is not None and schedule.seq_lens[row] == sequence.num_prompt_tokens:
            count = sequence.num_prompt_tokens if sequence.request.pooling == "mean" else 1
            done.append((sequence, (sequence.pooled / count).astype(np.float32)))
    return done


def _prompt_logprobs(sequence: Sequence, first: int, beyond: int, found: Logprobs, rows: range) -> PromptLogprobs:
    if np.isnan(found.chosen[rows.start : rows.stop]).any():
        raise PoisonedLogitsError("the model's logits were not finite")
    tokens = sequence.request.prompt_token_ids[first + 1 : beyond + 1]
    count = sequence.request.params.prompt_logprobs or 0
    entries = tuple(_entries(found, rows, tokens, count))
    sequence.num_scored_tokens = beyond + 1
    return PromptLogprobs(sequence, first + 1, entries)


def _add(sequence: Sequence, state: Floats, starts: bool) -> None:
    if not np.isfinite(state).all():
        raise PoisonedLogitsError("the model's hidden states were not finite")
    if sequence.pooled is None or starts:
        sequence.pooled = np.zeros(state.shape, np.float64)
    sequence.pooled += state


def _entries(found: Logprobs, rows: range, tokens: tuple[int, ...], count: int) -> Iterator[TokenLogprob]:
    for row, token_id in zip(rows, tokens, strict=True):
        top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
        rank = 0 if found.ranks is None else int(found.ranks[row])
        yield TokenLogprob(token_id, float(found.chosen[row]), tuple(top), rank)


def find_fault(outputs: StepOutputs, schedule: Schedule, wants_logprobs: bool, vocab_size: int) -> str | None:
    """Return why outputs cannot be those of a step that was scheduled so; None if they can."""
    tokens, counts, num_samples = outputs.token_ids, outputs.counts, len(schedule.samples)
    num_tokens = num_samples
    if counts is not None:
        if counts.shape != (num_samples,) or ((counts < 1) | (counts > schedule.most_draws)).any():
            return f"the executor drew other than 1 to {schedule.most_draws} tokens for each of {num_samples} rows"
        num_tokens = int(counts.sum())
    if tokens.dtype != INT32 or tokens.shape != (num_tokens,):
        return f"the executor returned {tokens.dtype}{list(tokens.shape)} for {num_tokens} tokens of int32"
    if num_tokens:
        ids = tokens.view(UINT32)  # negative ids are large ones here
        if ids[ids.argmax()] >= vocab_size:  # `max` takes twice as long
            return f"the executor drew a token outside the vocabulary of {vocab_size}"
    if wants_logprobs and num_samples and outputs.logprobs is None:
        return "the executor returned no log-probabilities although some were asked for"
    return None


def fill(report: StepReport, schedule: Schedule, outputs: StepOutputs, kept: Ints | None, fail: Fail) -> None:
    """Put the drawn tokens into the report, those that their sequences got.

    kept: how many tokens of each run that is, [num_samples]; None = one each, and no run is longer.
    """
    report.sequences, report.token_ids = schedule.samples, outputs.token_ids.tolist()
    places: Items[int] = range(len(report.token_ids))  # of the tokens among those that were drawn
    if kept is not None:
        lens = np.ones_like(kept) if outputs.counts is None else outputs.counts
        rows = np.repeat(np.arange(len(kept)), kept)
        starts = (lens.cumsum() - lens) - (kept.cumsum() - kept)
        places = (starts[rows] + np.arange(len(rows))).tolist()
        report.sequences = [schedule.samples[row] for row in rows.tolist()]
        report.token_ids = outputs.token_ids[places].tolist()
    if outputs.logprobs is not None:
        report.logprobs = _logprobs(report, places, outputs.logprobs, fail)


def failures(schedule: Schedule, outputs: StepOutputs) -> dict[int, Exception]:
    """Return why rows of a step gave no token, of sequences that are still there."""
    if not (outputs.failed or outputs.stuck):
        return {}
    poisoned = PoisonedLogitsError("the model's logits were not finite")
    found: dict[int, Exception] = dict.fromkeys(outputs.failed, poisoned)
    found |= {row: _stuck(schedule.samples[row]) for row in outputs.stuck}
    return {row: error for row, error in found.items() if schedule.samples[row] not in schedule.gone}


def _logprobs(report: StepReport, places: Items[int], found: Logprobs, fail: Fail) -> dict[int, TokenLogprob]:
    """Return the figures of those that asked, each cut to as many as it asked for. places: see `fill`."""
    logprobs: dict[int, TokenLogprob] = {}
    for row, (sequence, place) in enumerate(zip(report.sequences, places, strict=True)):
        params = sequence.request.params
        count = params.logprobs
        if count is None:
            continue
        try:
            if params.whole_rows:
                logprobs[row] = _of_whole_row(report.token_ids[row], found.whole[place], params)
                continue
            top = zip(found.top_ids[place, :count].tolist(), found.top[place, :count].tolist(), strict=True)
            logprobs[row] = TokenLogprob(report.token_ids[row], float(found.chosen[place]), tuple(top))
        except Exception as error:
            fail(sequence, error)
    return logprobs


def _of_whole_row(token: int, values: Floats, params: SamplingParams) -> TokenLogprob:
    """Return what is told of a token, given those of the whole vocabulary; of equals the lower id comes first."""
    ids = np.array(params.logprob_token_ids, np.intp)
    if not len(ids):
        ids = np.argsort(-values, kind="stable")[: params.num_alternatives(len(values))]
    top = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return TokenLogprob(token, float(values[token]), tuple(top))


def _stuck(sequence: Sequence) -> Exception:
    """Where its grammar, if it has one, left tokens, nothing but what the client asked for can be the reason."""
    if sequence.mismatch is not None:
        return sequence.mismatch
    rules = "min_tokens" if sequence.request.params.structured is None else "what the output must match"
    return InvalidRequestError(
        f"allowed_token_ids, bad_words and {rules} together leave no token to draw; allow more tokens",
        code="no_token_left",
    )


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
        """Whether the device has a step with a sequence that has not left."""
        return self.step is not None and not self.step.schedule.is_unwanted

    def tokens(self) -> Ints:
        """Wait for the tokens of the step, -1 where there is none. Raises `EngineDeadError` as `results` does."""
        if self.step is None:
            raise IntegrityError("tokens are wanted of a step that was not launched")
        outputs = self.results(self.step)
        tokens = outputs.token_ids
        if none := [*outputs.failed, *outputs.stuck]:
            tokens = tokens.copy()
            tokens[none] = -1
        return tokens

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
        fault = find_fault(outputs, launched.schedule, launched.wants_logprobs, self._vocab_size)
        if fault is not None:
            raise EngineDeadError(fault)
        launched.outputs = outputs
        return outputs


class Launcher:
    """Schedules steps, prepares their inputs and gives them to the executor.

    on_begin: called, before a step runs, with the requests that it is the first to compute something for.
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
                self._scheduler.recompute(planned_at)
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
