"""Which tokens the next step computes, and which sequences join or leave for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from engine.config import EngineConfig
from engine.events import Added, Events, Preempted, Starved
from engine.report import EngineStats, Finish, Ints
from engine.request import FinishReason, GrammarState, Request, Sequence, SequenceStatus
from engine.scheduler.admission import Admission
from engine.scheduler.batch_state import BatchState
from engine.scheduler.prefill_adder import PrefillAdder
from engine.scheduler.schedule import Hold, Index, Schedule
from engine.scheduler.slots import Slots
from engine.scheduler.update import FailureGuard, Updater
from engine.scheduler.waiting import Deadlines

logger = logging.getLogger(__name__)

DEADLINE_EXCEEDED = "deadline_exceeded"  # code of the error that ends a request whose deadline passed
NO_FAILURES: Mapping[int, Exception] = MappingProxyType({})
NO_GRAMMARS: Mapping[int, GrammarState] = MappingProxyType({})


class Scheduler:
    """One token budget per step: decodes first, then prompt chunks in running order, then waiting sequences.

    A step's way: `schedule`, then `advance` when the device has it, then `collect` with its tokens; the next step may
    be scheduled and advanced in between (`Hold` says when not). `add` and `abort` come whenever nothing else does.
    Nothing counts as computed before `advance`, so a schedule that was not run may simply be asked for again.

    Preemption takes the youngest (or least urgent) sequence, which is recomputed later. The oldest is never taken for
    another's sake, and every request fits the cache alone, so something always advances.
    A host-side exception on one sequence's account ends its request with ERROR and affects no other; where it may
    have (`FailureGuard`), everything is checked, and `schedule` and `collect` raise `IntegrityError` if it did.

    now: seconds on the engine's clock at which the step began; set by the core before each step.
    most_draws: tokens that a row may draw in a step at most; how many it does is a result of the step.
    """

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        admission: Admission,
        events: Events,
        now: float,
        most_draws: int = 1,
    ) -> None:
        self.now = now
        self._events = events
        self._batch = BatchState(slots, by_priority=config.scheduling_policy == "priority")
        self._guard = FailureGuard(self._batch)
        self._updater = Updater(slots, self._batch, self._guard)
        self._adder = PrefillAdder(config, slots, self._batch, self._guard, events, admission.limit)
        self._deadlines = Deadlines(self._batch.holds)
        self._slots = slots
        self._tables = slots.tables
        self._pool = slots.pool
        self._budget = config.token_budget
        self._chunk = config.long_prefill_token_threshold or self._budget
        self._most_draws = most_draws
        self._any_starved = False  # in the last step
        self._ones: Ints = np.ones(config.max_num_seqs, np.int32)
        self._num_preempted = self._num_generated = self._num_ahead = self._num_held = 0

    # ---- between steps ------------------------------------------------------------------------------------------

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._batch

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to run or to report."""
        return self._batch.has_unfinished

    def add(self, request: Request, now: float, grammars: Mapping[int, GrammarState] = NO_GRAMMARS) -> None:
        """Let a checked request wait. now: its arrival in seconds, unless it brings its own.

        grammars: choice -> where its output stands in the grammar that it must match.
        """
        number = self._batch.add(request, now, grammars)
        self._events.emit(Added(request, now))
        if request.deadline is not None:
            self._deadlines.watch(request.deadline, request.request_id, number)

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request and free what they hold. False if there is no such request."""
        known = request_id in self._batch
        self._batch.finish_request(request_id, FinishReason.ABORT)
        self._batch.refresh()
        return known

    def expire(self, now: float) -> None:
        """End with an error what ran out of time, whether it waits or runs. now: seconds on the engine's clock."""
        for request_id in self._deadlines.take_passed(now):
            message = "the request's deadline passed"
            self._batch.finish_request(request_id, FinishReason.ERROR, message, DEADLINE_EXCEEDED)
        self._batch.refresh()

    def finish_choice(self, request_id: str, choice: int) -> bool:
        """End one choice that has drawn a token. False if there is no such choice."""
        known = self._batch.finish_choice(request_id, choice, FinishReason.ABORT)
        self._batch.refresh()
        return known

    def preempt_all(self, now: float) -> None:
        """Send all that runs back to wait: its tokens are kept, its blocks are not. now: seconds on the clock."""
        for _ in range(len(self._batch.running)):
            self._preempt(now)
        self._batch.refresh()

    def recompute(self, now: float) -> None:
        """Note that a step broke off: where it may have left recurrent states half changed, all start again."""
        if self._slots.states is not None:
            self.preempt_all(now)

    def mark(self, sequence: Sequence, error: Exception) -> None:
        """Have the whole request of `sequence` end with ERROR when its step is collected, which comes next."""
        self._guard.mark(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End the whole request of `sequence` with ERROR."""
        self._guard.mark(sequence, error)
        self._guard.end_failed()
        self._batch.refresh()

    def take_finished(self) -> list[Finish]:
        """Return what ended since the last call."""
        return self._batch.take_finished()

    def unreported(self, schedule: Schedule) -> list[Sequence]:
        """Return sequences that left since the step was launched and whose end is not reported yet."""
        return self._batch.unreported(schedule.gone) if schedule.gone else []

    def running(self) -> tuple[list[Sequence], Index]:
        """Return the running sequences, which hold all blocks, and their slots."""
        return self._batch.running, self._batch.running_slots

    # ---- before the step ----------------------------------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """Whether a step that was launched is still to be collected."""
        return bool(self._batch.in_flight)

    def schedule(self) -> Schedule | None:
        """Choose the tokens of the next step; None when there is nothing to compute, or not yet."""
        batch = self._batch
        before = batch.in_flight[-1] if batch.in_flight else None
        if before is not None and (reason := before.holds_next):
            self.hold(reason)
            return None
        run = batch.decode_run()
        if run is not None:
            query_lens, grown = run.last.query_lens, run.grow()
        else:
            query_lens = self._share_budget()
            if before is not None and batch.lacks_blocks(query_lens):
                self.hold(Hold.BLOCKS)
                return None
            grown = self._make_room(query_lens)
        if batch.waiting and not batch.stale:
            query_lens = self._adder.add(query_lens, self.now)
        if (stays := batch.refresh()) is not None:
            query_lens = query_lens[stays]
        self._check_if_in_doubt()
        if run is not None and run.last.version == batch.version:
            return batch.plan_on(run)
        return batch.plan(query_lens, grown, self._most_draws) if batch.running else None

    def hold(self, reason: Hold) -> None:
        """Note that the next step waits for the results of the one that runs."""
        logger.debug("a step waits for the one before it: %s", reason.value)
        self._num_held += 1

    def take_begun(self) -> list[Request]:
        """Return the requests that steps were scheduled for since the last call, and none before."""
        begun = self._adder.begun
        if begun:
            self._adder.begun = []
        return begun

    def _share_budget(self) -> Ints:
        """Return how many tokens each running sequence computes, 0 if its last one is being drawn. [running]."""
        batch, tables, slots = self._batch, self._tables, self._batch.running_slots
        if not batch.prefilling and len(slots) <= self._budget and not self._any_starved:
            if not batch.in_flight:
                return self._ones[: len(slots)]
            return (tables.num_tokens[slots] < tables.limits[slots]).astype(np.int32)
        num_tokens = tables.num_tokens[slots]
        left = num_tokens - tables.num_computed[slots]
        if batch.in_flight:
            left[num_tokens >= tables.limits[slots]] = 0
        wanted = np.minimum(left, self._chunk)
        if self._slots.states is not None:
            wanted = self._slots.states.cut(wanted, tables.num_computed[slots])
        decodes_first = np.argsort(left > 1, kind="stable")
        served = wanted[decodes_first]
        ends = np.cumsum(served)
        query_lens = np.empty_like(wanted)
        query_lens[decodes_first] = np.clip(self._budget - (ends - served), 0, served)
        if served.sum() > self._budget or self._any_starved:
            starved = (query_lens < np.minimum(left, 1)).nonzero()[0].tolist()
            self._events.emit(Starved(tuple(batch.running[row].request for row in starved), self.now))
            self._any_starved = bool(starved)
        return query_lens

    def _make_room(self, query_lens: Ints) -> Index:
        """Give every row the blocks that it writes to, preempting where there are none. Returns rows that grew."""
        batch, slots = self._batch, self._batch.running_slots
        for sequence in list(batch.tail_sharers):
            if query_lens[batch.running.index(sequence)]:
                self._guard.run(sequence, self._part_tail, sequence)
        self._guard.end_failed()
        seq_lens = self._tables.num_computed[slots] + query_lens
        short = (seq_lens > self._slots.capacity(slots)).nonzero()[0]
        if not short.size:
            return short
        if not batch.prefilling and not batch.stale and short.size <= self._pool.num_available:
            computed = self._tables.num_computed[slots]
            self._slots.grow_by_one(self._slots.last_blocks(batch.running, slots, computed, short).next())
            return short
        for sequence, length in [(batch.running[row], int(seq_lens[row])) for row in short.tolist()]:
            if sequence.status is SequenceStatus.RUNNING:
                self._guard.run(sequence, self._grow, sequence, length)
        self._guard.end_failed()
        return short

    def _part_tail(self, sequence: Sequence) -> None:
        position = sequence.num_computed_tokens
        if self._free_blocks(sequence, lambda: int(self._slots.shares_block(sequence, position))):
            self._batch.part_tail(sequence)

    def _grow(self, sequence: Sequence, length: int) -> None:
        wanted = self._slots.missing_blocks(sequence, length)
        if self._free_blocks(sequence, lambda: wanted):
            self._slots.grow(sequence, length)

    def _free_blocks(self, sequence: Sequence, wanted: Callable[[], int]) -> bool:
        """Preempt until `wanted` blocks are available. False if `sequence` itself had to go."""
        while sequence.status is SequenceStatus.RUNNING and self._pool.num_available < wanted():
            self._preempt(self.now)
        return sequence.status is SequenceStatus.RUNNING

    def _preempt(self, now: float) -> None:
        self._events.emit(Preempted(self._batch.preempt(now).request, self.now))
        self._num_preempted += 1

    # ---- after the step -----------------------------------------------------------------------------------------

    def advance(self, schedule: Schedule) -> None:
        """Count what a step that was launched computes and draws."""
        self._num_ahead += self.is_ahead
        self._batch.launch(schedule)

    def collect(
        self,
        schedule: Schedule,
        token_ids: Ints,
        counts: Ints | None = None,
        failed: Mapping[int, Exception] = NO_FAILURES,
    ) -> Ints | None:
        """Take in a step that was run; see `Updater.collect`, which says what is given and returned."""
        kept = self._updater.collect(schedule, token_ids, counts, failed)
        self._num_generated += len(schedule.samples) if kept is None else int(kept.sum())
        self._check_if_in_doubt()
        return kept

    def drop(self, schedule: Schedule) -> None:
        """Forget a step in flight whose sequences have all left."""
        self._batch.land(schedule)
        if self._slots.states is not None and schedule.states is not None:
            self._slots.states.collect(schedule, schedule.states, dropped=True)

    def note_first_tokens(self, now: float) -> None:
        """Note what drew a first token in the step that was collected last. now: when it had run, in seconds."""
        self._batch.note_first_tokens(now)

    # ---- figures and invariants ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the figures as they are now."""
        batch, pool = self._batch, self._pool
        prefilling = 0
        for sequence in batch.prefilling:
            prefilling += sequence.num_tokens - sequence.num_computed_tokens
        return EngineStats(  # by position, which takes a third of the time
            len(batch.running),
            len(batch.waiting),
            pool.num_blocks - 1,
            pool.num_free,
            pool.num_cached,
            self._adder.prefix_queries,
            self._adder.prefix_hits,
            self._num_preempted,
            self._adder.prompt_tokens,
            self._num_generated,
            batch.waiting.num_tokens + prefilling,
            self._num_ahead,
            self._num_held,
            batch.waiting.waits_since(),
        )

    def _check_if_in_doubt(self) -> None:
        """Make sure that a bug of ours which ended a request left all others whole. Raises `IntegrityError`."""
        if self._guard.in_doubt:
            self.check_integrity()
            self._guard.in_doubt = False

    def check_integrity(self) -> None:
        """Check every invariant of queues, slots and blocks. Between steps only. Raises `IntegrityError`."""
        self._batch.check_integrity()
