"""The engine's step: schedule, prepare, execute, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np

from engine.admission import Admission
from engine.block_manager import NO_EVENTS, BlockManager
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDeadError,
    GrammarError,
    InvalidRequestError,
    PoisonedLogitsError,
    StepMemoryError,
)
from engine.executor import Executor
from engine.flight import FlightRecorder, WaitLog
from engine.grammar.base import CompiledGrammar, grammar_states
from engine.grammar.masks import MaskMaker
from engine.inputs import InputBuilder
from engine.ledger import Costs, Ledger
from engine.prompt_results import is_poisoned, take_pooled, take_prompt_logprobs
from engine.report import (
    BlockEvents,
    EngineStats,
    Logprobs,
    SamplingInputs,
    StepInputs,
    StepOutputs,
    StepReport,
    TokenLogprob,
)
from engine.request import Request, Sequence
from engine.rows import Rows
from engine.sampling_inputs import SamplingTable
from engine.sampling_params import SamplingParams
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from engine.stops import StopTokens
from engine.tables import Tables


class EngineCore:
    """One model on one group of workers, driven step by step. Used by one thread.

    Every request that `add` accepts ends in exactly one `Finish` per sequence, in the report of some later step.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        num_kv_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """config: resolved (`max_model_len` is set). num_kv_blocks: KV blocks, the null block included.

        vocab_size: width of the logits; every token id, in or out, is below it. clock: seconds, never backwards.

        Raises `ConfigError` when there is no block to use, or an end-of-sequence id is outside the vocabulary.
        """
        if num_kv_blocks < 2:
            raise ConfigError(
                f"num_kv_blocks must be at least 2, the null block and one to use, not {num_kv_blocks}",
                "num_kv_blocks",
            )
        stops = StopTokens(_checked(eos_token_ids, vocab_size), vocab_size)
        tables = Tables(config.max_num_seqs, config.context_len, config.max_blocks_per_seq)
        params = SamplingTable(config.max_num_seqs)
        self._blocks = BlockManager(num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self._admission = Admission(config, vocab_size, (num_kv_blocks - 1) * config.block_size)
        self._ledger = Ledger(config.tensor_parallel_size, tables, self._blocks, clock())
        rows = Rows(tables, params, self._blocks, stops, self._ledger)
        self._flight = FlightRecorder(clock)
        self._waits = WaitLog(self._flight, clock())
        self._scheduler = Scheduler(config, rows, stops, self._admission, self._waits)
        self._masks = MaskMaker(config.max_num_seqs, vocab_size)
        self._inputs = InputBuilder(tables, params, self._masks, config.block_size, config.max_num_batched_tokens)
        self._executor = executor
        self._vocab_size = vocab_size
        self._clock = clock
        self._num_steps = 0
        self._ran_at = clock()  # when the last step had run
        self._executed = 0.0  # seconds that this step spent in the executor
        self._dead: str | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would bring something: a token, or an end that is not reported yet."""
        return self._scheduler.has_unfinished

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Accept a request; it starts with the next step that has room.

        grammar: `request.params.structured`, compiled for this model's vocabulary.

        Raises `InvalidRequestError` or `PromptTooLongError`, naming the field, before anything changes;
        `EngineDeadError` after the executor failed.
        """
        self._check_alive()
        self._admission.check(request)
        if request.request_id in self._scheduler:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", "request_id")
        self._scheduler.add(request, self._clock(), grammar_states(request, grammar))

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; the next report tells of it. False if it is not live."""
        return self._scheduler.abort(request_id)

    def finish_choice(self, request_id: str, choice: int) -> bool:
        """End one choice whose text is complete (a stop string); the request's others go on, the next report tells.

        Only a choice that has drawn a token can be ended alone; False otherwise, or if it is not live.
        """
        return self._scheduler.finish_choice(request_id, choice)

    def step(self) -> StepReport:
        """Compute one step. With nothing to compute the report is empty and the executor is not called.

        Raises `EngineDeadError` when the executor failed; the engine is then of no more use.
        """
        self._check_alive()
        began = self._clock()
        self._ledger.idle(began)
        self._waits.now = began
        self._scheduler.expire(began)
        computed = self._compute()
        if computed is None:
            return self._report(None, None)
        schedule, outputs = computed
        self._ledger.ran(schedule, *self._scheduler.batch(), self._ran_at)
        prompt_logprobs = take_prompt_logprobs(schedule, outputs, self._scheduler.mark)
        pooled = take_pooled(schedule, outputs, self._scheduler.mark)
        self._scheduler.update(schedule, outputs.token_ids, _failures(schedule, outputs))
        if is_poisoned(outputs):
            # Whatever made the logits bad may sit in blocks that others would find.
            self._blocks.clear_cache()
        self._scheduler.note_births(self._ran_at)
        report = self._report(schedule, outputs)
        report.prompt_logprobs, report.pooled = prompt_logprobs, pooled
        report.executed, report.channel = self._executed, outputs.channel
        report.seconds = self._clock() - began
        return report

    def stats(self) -> EngineStats:
        """Return the figures as they are now."""
        return self._scheduler.stats()

    @property
    def flight(self) -> FlightRecorder:
        """What requests had to wait for. From any thread."""
        return self._flight

    def costs(self) -> Costs:
        """Return who has used the devices and the blocks until now. Between steps only."""
        return self._ledger.costs(self._clock())

    def cached_blocks(self) -> BlockEvents:
        """Return all that the prefix cache holds, as one event for a listener that joins late."""
        return BlockEvents(stored=self._blocks.known_hashes(), cleared=True)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (after new weights); running sequences are not disturbed."""
        self._blocks.clear_cache()

    def check_integrity(self) -> None:
        """Check all invariants of queues, tables, blocks and accounts. Raises `IntegrityError`. O(all): for tests."""
        self._scheduler.check_integrity()
        self._ledger.check_integrity()

    def close(self) -> None:
        """End the executor. Can be called twice; `add` and `step` raise `EngineDeadError` afterwards."""
        self._dead = self._dead or "it was closed"
        self._masks.close()
        self._executor.close()

    def _compute(self) -> tuple[Schedule, StepOutputs] | None:
        """Schedule, prepare and run. Where there is no memory for a step, its newest request is shed."""
        self._executed = 0.0
        while (planned := self._plan()) is not None:
            schedule, inputs, sampling = planned
            try:
                return schedule, self._execute(inputs, sampling)
            except StepMemoryError as error:
                newest = max(schedule.sequences, key=lambda sequence: (sequence.arrival_time, sequence.order))
                self._scheduler.fail(newest, error)
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

    def _execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        began = self._clock()
        try:
            outputs = self._executor.execute(inputs, sampling)
        except StepMemoryError:
            self._executed += self._clock() - began
            raise
        except Exception as error:
            self._dead = f"a step failed: {error}"
            if isinstance(error, EngineDeadError):
                raise
            raise EngineDeadError(f"the executor failed: {error}") from error
        self._ran_at = self._clock()
        self._executed += self._ran_at - began
        self._check_outputs(outputs, sampling)
        return outputs

    def _check_outputs(self, outputs: StepOutputs, sampling: SamplingInputs) -> None:
        tokens, wanted = outputs.token_ids, len(sampling.temperature)
        if tokens.dtype != np.int32 or tokens.shape != (wanted,):
            self._die(f"the executor returned {tokens.dtype}{list(tokens.shape)} for {wanted} tokens of int32")
        if wanted and int(tokens.view(np.uint32).max()) >= self._vocab_size:  # negative ids are large ones here
            self._die(f"the executor drew a token outside the vocabulary of {self._vocab_size}")
        if sampling.num_logprobs >= 0 and wanted and outputs.logprobs is None:
            self._die("the executor returned no log-probabilities although some were asked for")

    def _die(self, reason: str) -> NoReturn:
        self._dead = reason
        raise EngineDeadError(reason)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine takes nothing more: {self._dead}")

    def _report(self, schedule: Schedule | None, outputs: StepOutputs | None) -> StepReport:
        report = StepReport(self._num_steps, [], [], {}, [], NO_EVENTS, EngineStats())
        if schedule is not None and outputs is not None:
            self._num_steps += 1
            report.step = self._num_steps
            report.num_tokens = schedule.num_tokens
            report.num_sequences = len(schedule.sequences)
            self._fill(report, schedule.samples, outputs)
        report.finished = self._scheduler.take_finished()
        if report.finished:
            self._ledger.settle()
            for finish in report.finished:
                finish.sequence.ended_at = self._ran_at
                self._waits.ended(finish.sequence.request.request_id, finish.told)
        report.events = self._blocks.take_events()
        report.stats = self._scheduler.stats()
        return report

    def _fill(self, report: StepReport, samples: list[Sequence], outputs: StepOutputs) -> None:
        """Put the drawn tokens into the report, without those of rows that failed."""
        tokens = outputs.token_ids.tolist()
        if outputs.logprobs is not None:
            report.logprobs = self._logprobs(samples, tokens, outputs.logprobs)
        report.sequences, report.token_ids = samples, tokens
        if outputs.failed or outputs.stuck:
            kept = [row for row in range(len(samples)) if row not in (*outputs.failed, *outputs.stuck)]
            report.sequences = [samples[row] for row in kept]
            report.token_ids = [tokens[row] for row in kept]
            report.logprobs = {new: report.logprobs[row] for new, row in enumerate(kept) if row in report.logprobs}

    def _logprobs(self, samples: list[Sequence], token_ids: list[int], found: Logprobs) -> dict[int, TokenLogprob]:
        """Return the figures of those that asked, each cut to as many as it asked for."""
        logprobs: dict[int, TokenLogprob] = {}
        for row, sequence in enumerate(samples):
            count = sequence.request.params.logprobs
            if count is None:
                continue
            try:
                top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
                logprobs[row] = TokenLogprob(token_ids[row], float(found.chosen[row]), tuple(top))
            except Exception as error:
                self._scheduler.fail(sequence, error)
        return logprobs


def _failures(schedule: Schedule, outputs: StepOutputs) -> dict[int, Exception]:
    """Return why rows of a step gave no token."""
    if not (outputs.failed or outputs.stuck):
        return {}
    poisoned = PoisonedLogitsError("the model's logits were not finite")
    failures: dict[int, Exception] = dict.fromkeys(outputs.failed, poisoned)
    return failures | {row: _stuck(schedule.samples[row].request.params) for row in outputs.stuck}


def _stuck(params: SamplingParams) -> Exception:
    """Without a grammar, which may have failed, nothing but what the client asked for can be the reason."""
    if params.structured is not None:
        return GrammarError("allowed_token_ids, bad_words and the grammar leave no token to draw")
    return InvalidRequestError(
        "allowed_token_ids, bad_words and min_tokens together leave no token to draw", code="no_token_left"
    )


def _checked(eos_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    ids = tuple(eos_token_ids)
    if any(not 0 <= token < vocab_size for token in ids):
        raise ConfigError(f"eos_token_ids {ids} must lie in the model's vocabulary of {vocab_size}", "model")
    return ids
