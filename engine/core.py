"""The engine's step: schedule, prepare, execute, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from engine.config import EngineConfig
from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    IntegrityError,
    InvalidRequestError,
    StepMemoryError,
)
from engine.events import Began, Ended, Events, Idle, OnEvent, Ran, Shares
from engine.grammar.base import CompiledGrammar
from engine.inputs.grammar_masks import MaskMaker, grammar_states
from engine.inputs.prepare import InputBuilder
from engine.kv.block_manager import NO_EVENTS, BlockManager
from engine.kv.snapshots import StateSnapshots
from engine.report import BlockEvents, EngineStats, Ints, StepOutputs, StepReport
from engine.request import Request, Sequence
from engine.sampling.parameter_table import SamplingTable
from engine.scheduler.admission import Admission
from engine.scheduler.schedule import Schedule
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slots import Slots, SlotTables, StopTokens
from engine.scheduler.states import States
from engine.step import (
    InFlight,
    Launched,
    Launcher,
    OnBegin,
    failures,
    fill,
    is_poisoned,
    take_pooled,
    take_prompt_logprobs,
)
from engine.worker.executor import Executor
from engine.worker.sleep import WEIGHTS, Sleep

NO_STATS = EngineStats()


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
        tables = SlotTables(config.max_num_seqs, config.context_len, config.block_size)
        params = SamplingTable(config.max_num_seqs)
        states = _states(config)
        snapshots = None if states is None else states.snapshots
        self._blocks = BlockManager(num_kv_blocks, config.block_size, config.enable_prefix_caching, snapshots)
        self._admission = Admission(config, vocab_size, (num_kv_blocks - 1) * config.block_size)
        self._events = Events(lambda event: None)  # until there is a listener
        slots = Slots(tables, params, self._blocks, stops, self._events, states)
        draws = executor.most_draws
        self._scheduler = Scheduler(config, slots, self._admission, self._events, clock(), draws)
        self._in_flight = InFlight(vocab_size, clock)
        self._masks = MaskMaker(config.max_num_seqs, vocab_size, self._in_flight.tokens)
        inputs = InputBuilder(tables, params, self._masks, config.block_size, config.token_budget)
        self._launcher = Launcher(self._scheduler, inputs, executor, clock)
        self._executor = executor
        self.clock = clock
        self._tables = tables
        self._shares: tuple[int, list[Sequence] | None] = (0, None)  # version and batch of the last event
        self._began = Began(clock(), config.tensor_parallel_size, num_kv_blocks - 1)
        self._overlaps = config.overlaps
        self._num_steps = 0
        self._collected_at = self._in_flight.ran_at  # when the last step was
        self._dead: str | None = None
        self._sleep = Sleep(executor)
        self._on_cpu = config.on_cpu
        self._unreported: StepReport | None = None  # of the step that was collected to fall asleep

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would report something: a token, or an end that is not reported yet."""
        return self._unreported is not None or self._scheduler.has_unfinished

    def call_on_begin(self, listener: OnBegin) -> None:
        """Have `listener` called with the requests that a step is the first to compute something for.

        It is called just before the step runs, so that they are known even if the process dies in it.
        """
        self._launcher.on_begin = listener

    def call_on_event(self, listener: OnEvent) -> None:
        """Have `listener` called with each event (`engine.events`) as it happens, on the engine's thread."""
        self._events.emit = listener
        listener(self._began)

    def emit_time(self) -> None:
        """Emit that time passed until now without a step; nothing while one runs."""
        if not self._in_flight.is_wanted:
            self._events.emit(Idle(self.clock()))

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Accept a request; it starts with the next step that has room.

        grammar: `request.params.structured`, compiled for this model's vocabulary.

        Raises `InvalidRequestError` or `PromptTooLongError`, naming the field, before anything changes;
        `EngineDeadError` after the executor failed, or if this broke what others share.
        """
        self._check_alive()
        self._admission.check(request)
        if request.request_id in self._scheduler:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", "request_id")
        grammars = grammar_states(request, grammar)
        try:
            self._scheduler.add(request, self.clock(), grammars)
        except Exception as error:
            self._take_back(request.request_id, error)
            raise

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; the next report says so. False if it is not live."""
        return self._scheduler.abort(request_id)

    def finish_choice(self, request_id: str, choice: int) -> bool:
        """End one choice whose text is complete (a stop string); the request's other choices go on.

        The next report says so. Only a choice that has drawn a token can be ended alone; False otherwise, or if it is
        not live.
        """
        return self._scheduler.finish_choice(request_id, choice)

    def step(self) -> StepReport:
        """Compute one step. Asleep or with nothing to compute the report has no token and the executor is not called.

        Where steps overlap, the one after it is launched before its results are waited for.

        Raises `EngineDeadError` when the executor failed, or an invariant of queues, rows or blocks is broken; the
        engine is then of no more use.
        """
        self._check_alive()
        if (report := self._unreported) is not None:
            self._unreported = None
            return report
        try:
            return self._step()
        except IntegrityError as error:
            raise self._broken(error) from error

    def _step(self) -> StepReport:
        self._begin(self.clock())
        step = self._in_flight.step = self._in_flight.step or self._launch()
        if step is None:
            return self._report()
        ahead = self._launch() if self._overlaps else None
        self._in_flight.step = ahead
        return self._collect(step)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of the weights, until `wake_up`.

        level: 1 keeps the weights in the host's memory; 2 keeps them nowhere and reads them from the model's folder
        at waking, which may hold others by then. What runs goes back to wait, its tokens kept; cached prefixes are
        forgotten. Meanwhile requests are taken and wait, and a step computes nothing; the first one reports the
        results of the step that was in flight. An engine that sleeps already as deeply goes on sleeping.

        Raises `ConfigError` for another level, or where it would have to wake up before; `StepMemoryError` where the
        host has no room for the weights, after which an engine that is no group goes on; and `EngineDeadError`.
        """
        self._check_alive()
        if self._sleep.begins(level):
            try:
                self._pause()
            except IntegrityError as error:
                raise self._broken(error) from error
            self._or_die(lambda: self._sleep.begin(level))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Wake up, or only these parts: `weights`, `kv_cache`. Steps go on once both are awake.

        Raises `ConfigError` for an unknown tag; `CheckpointError` and `StepMemoryError`, after which the engine still
        sleeps and may be woken again, unless it is a group, which ends; and `EngineDeadError`.
        """
        self._check_alive()
        self._or_die(lambda: self._sleep.end(tags))

    @property
    def fingerprint(self) -> str:
        """Of the weights that are loaded, and of what is made of them; waking may change it."""
        return self._executor.fingerprint

    @property
    def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, so that no step computes anything."""
        return self._sleep.level > 0

    @property
    def sleep_level(self) -> int:
        """The level at which it sleeps, 0 while it is awake."""
        return self._sleep.level

    @property
    def asleep(self) -> tuple[str, ...]:
        """Which parts of it sleep: `weights`, `kv_cache`."""
        return self._sleep.asleep

    @property
    def released(self) -> tuple[str, ...]:
        """Those of them whose memory is free: on a CPU the weights stay where they are at level 1."""
        stays = self._on_cpu and self.sleep_level == 1
        return tuple(part for part in self.asleep if not (stays and part == WEIGHTS))

    def stats(self) -> EngineStats:
        """Return the figures as they are now."""
        return self._scheduler.stats()

    def cached_blocks(self) -> BlockEvents:
        """Return all that the prefix cache holds, as one event for a listener that joins late."""
        return BlockEvents(stored=self._blocks.known_hashes(), cleared=True)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (after new weights); running sequences are not disturbed."""
        self._clear_cache()

    def check_integrity(self) -> None:
        """Check all invariants of queues, tables and blocks. Raises `IntegrityError`. O(all): for tests."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """End the executor, and the step that it may be at. `add` and `step` raise `EngineDeadError` afterwards.

        Can be called twice.
        """
        self._dead = self._dead or "it was closed"
        self._in_flight.step = None
        self._masks.close()
        self._executor.close()

    def _pause(self) -> None:
        """Collect the step in flight, preempt all running sequences and clear the prefix cache."""
        self._begin(self.clock())
        step, self._in_flight.step = self._in_flight.step, None
        if step is not None:
            self._unreported = self._collect(step)
        self._scheduler.preempt_all(self.clock())
        self._blocks.clear_cache()

    def _begin(self, now: float) -> None:
        """End requests whose deadline passed, and drop the step in flight if all its sequences have left."""
        self._scheduler.now = now
        step = self._in_flight.step
        if not self._in_flight.is_wanted:
            self._events.emit(Idle(now))
        self._scheduler.expire(now)
        if step is not None and step.schedule.is_unwanted:
            self._results(step)
            self._events.emit(Idle(self._in_flight.ran_at))
            self._scheduler.drop(step.schedule)
            self._in_flight.step = None

    def _launch(self) -> Launched | None:
        if self.is_sleeping:
            return None
        try:
            return self._launcher.launch()
        except EngineDeadError as error:
            self._dead = f"a step failed: {error}"
            raise

    def _collect(self, step: Launched) -> StepReport:
        """Wait for a step's results, update the sequences and report."""
        schedule, scheduler = step.schedule, self._scheduler
        outputs = self._results(step)
        self._emit_ran(schedule)
        prompt_logprobs = take_prompt_logprobs(schedule, outputs, scheduler.mark)
        pooled = take_pooled(schedule, outputs, scheduler.mark)
        kept = scheduler.collect(schedule, outputs.token_ids, outputs.counts, failures(schedule, outputs))
        if is_poisoned(outputs):
            self._clear_cache()  # whatever made the logits bad may sit in blocks that others would find
        elif step.tainted:
            self._blocks.clear_cache()
        scheduler.note_first_tokens(self._in_flight.ran_at)
        self._num_steps += 1
        report = StepReport(self._num_steps, [], [], {}, [], NO_EVENTS, NO_STATS)
        report.num_tokens = schedule.num_tokens
        report.num_sequences = len(schedule.sequences)
        fill(report, schedule, outputs, kept, scheduler.fail)
        self._report(report)
        report.prompt_logprobs, report.pooled = prompt_logprobs, pooled
        self._time(report, step)
        report.channel = outputs.channel
        return report

    def _emit_ran(self, schedule: Schedule) -> None:
        """Emit that a step ran, and for which sequences unless they are those of the last event."""
        running, slots = self._scheduler.running()
        left = self._scheduler.unreported(schedule)
        shares = None
        version, batch = self._shares
        if not schedule.version or schedule.version != version or batch is not running or left:
            tokens = _tokens(schedule, running)
            shares = Shares(running, slots, tokens, self._tables.num_blocks)
            self._shares = schedule.version, running
        their_tokens = zip(left, _tokens(schedule, left).tolist(), strict=True) if left else ()
        self._events.emit(Ran(self._in_flight.ran_at, shares, tuple(their_tokens)))

    def _time(self, report: StepReport, step: Launched) -> None:
        """Note how long a step took: from when it began, or the one before it was collected, until now."""
        now = self.clock()
        report.seconds = now - max(step.planned_at, self._collected_at)
        began = max(step.launched_at, step.ran_before)
        report.executed = min(self._in_flight.ran_at - began + step.tried, report.seconds)
        self._collected_at = now

    def _clear_cache(self) -> None:
        """Forget all cached prefixes, those included that the step in flight would still add."""
        self._blocks.clear_cache()
        if self._in_flight.step is not None:
            self._in_flight.step.tainted = True

    def _results(self, step: Launched) -> StepOutputs:
        """Wait for a step's results."""
        try:
            return self._in_flight.results(step)
        except EngineDeadError as error:
            self._dead = f"a step failed: {error}"
            raise

    def _or_die(self, change: Callable[[], None]) -> None:
        """Fall asleep or wake up. What the executor does not survive ends the engine."""
        try:
            change()
        except (CheckpointError, ConfigError, StepMemoryError):
            raise
        except Exception as error:
            self._dead = f"it neither sleeps nor wakes: {error}"
            raise

    def _take_back(self, request_id: str, error: Exception) -> None:
        """Undo the adding of a request that failed half-way, of a bug of ours."""
        try:
            self._scheduler.abort(request_id)
            self.check_integrity()
        except Exception as broken:
            raise self._broken(broken) from error

    def _broken(self, error: Exception) -> EngineDeadError:
        """Note that the engine's state is broken; return what to raise."""
        found = str(error) if isinstance(error, IntegrityError) else type(error).__name__
        self._dead = f"its state is broken: {found}"
        return EngineDeadError(f"the engine's state is broken: {found}")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine takes nothing more: {self._dead}")

    def _report(self, report: StepReport | None = None) -> StepReport:
        """Complete the report of a step; without one, report what happened although none was computed."""
        report = report or StepReport(self._num_steps, [], [], {}, [], NO_EVENTS, NO_STATS)
        report.finished = self._scheduler.take_finished()
        for finish in report.finished:
            finish.sequence.ended_at = self._in_flight.ran_at
            self._events.emit(Ended(finish))
        report.events = self._blocks.take_events()
        report.stats = self._scheduler.stats()
        return report


def _tokens(schedule: Schedule, sequences: list[Sequence]) -> Ints:
    """Return the tokens that each of `sequences` computes in a step. [sequences]."""
    if schedule.sequences is sequences:
        return schedule.query_lens
    computed = dict(zip(schedule.sequences, schedule.query_lens.tolist(), strict=True))
    return np.array([computed.get(sequence, 0) for sequence in sequences], np.int32)


def _states(config: EngineConfig) -> States | None:
    """Return where recurrent states are kept track of; None for a model that keeps none."""
    if config.num_state_snapshots is None:
        return None
    snapshots = StateSnapshots(config.max_num_seqs, config.num_state_snapshots, config.snapshot_interval)
    return States(config.max_num_seqs, config.block_size, snapshots)


def _checked(eos_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    ids = tuple(eos_token_ids)
    if any(not 0 <= token < vocab_size for token in ids):
        raise ConfigError(f"eos_token_ids {ids} must lie in the model's vocabulary of {vocab_size}", "model")
    return ids
