"""Which tokens the next step computes, and who may join or must leave for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from engine.config import EngineConfig
from engine.grammar.base import GrammarState
from engine.report import EngineStats, Finish, Ints
from engine.request import FinishReason, Request, Sequence, SequenceStatus
from engine.scheduler.admission import Admission
from engine.scheduler.boundary import Boundary
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.holds import Hold, held_by, lacks_blocks
from engine.scheduler.newcomers import Newcomers
from engine.scheduler.planner import Planner
from engine.scheduler.roster import Roster
from engine.scheduler.rows import Rows
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.stops import StopTokens
from engine.scheduler.updater import Updater
from engine.telemetry.flight import WaitLog

logger = logging.getLogger(__name__)

DEADLINE_EXCEEDED = "deadline_exceeded"  # code of the error that ends a request whose deadline passed
NO_FAILURES: Mapping[int, Exception] = MappingProxyType({})
NO_GRAMMARS: Mapping[int, GrammarState] = MappingProxyType({})


class Scheduler:
    """One token budget per step: decodes first, then prompt chunks in running order, then whoever may join.

    A step's way: `schedule`, then `advance` when the device has it, then `land` with its tokens; the next step may be
    scheduled and advanced in between (`engine.scheduler.holds` says when not). `add` and `abort` come whenever
    nothing else does. Nothing counts as computed before `advance`, so a schedule that was not run may simply be asked
    for again.

    Preemption takes the youngest (or least urgent) sequence, which is recomputed later. The oldest is never taken for
    another's sake, and every request fits the cache alone, so something always advances.
    A host-side exception on one sequence's account ends its request with ERROR and touches nobody else; where it may
    have (`engine.scheduler.boundary`), everything is checked, and `schedule` and `land` raise `IntegrityError` if it
    did.
    """

    def __init__(
        self, config: EngineConfig, rows: Rows, stops: StopTokens, admission: Admission, waits: WaitLog
    ) -> None:
        self._waits = waits
        self._roster = Roster(rows, by_priority=config.scheduling_policy == "priority")
        self._boundary = Boundary(self._roster)
        self._updater = Updater(rows, self._roster, stops, self._boundary)
        self._planner = Planner(self._roster, rows)
        self._deadlines = Deadlines(self._roster.holds)
        self._rows = rows
        self._tables = rows.tables
        self._newcomers = Newcomers(config, rows, self._roster, self._boundary, waits, admission.limit)
        self._budget = config.max_num_batched_tokens
        self._chunk = config.long_prefill_token_threshold or self._budget
        self._num_preempted = 0
        self._num_generated = 0
        self._num_ahead = 0
        self._num_held = 0
        self._ones: Ints = np.ones(config.max_num_seqs, np.int32)

    # ---- between steps ------------------------------------------------------------------------------------------

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._roster

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to run or to report."""
        return self._roster.has_unfinished

    def add(self, request: Request, now: float, grammars: Mapping[int, GrammarState] = NO_GRAMMARS) -> None:
        """Let a checked request wait. now: its arrival in seconds, unless it brings its own.

        grammars: choice -> where its output stands in the grammar that it must match.
        """
        number = self._roster.add(request, now, grammars)
        self._waits.arrives(request, now)
        if request.deadline is not None:
            self._deadlines.watch(request.deadline, request.request_id, number)

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request and free what they hold. False if there is no such request."""
        known = request_id in self._roster
        self._roster.finish_request(request_id, FinishReason.ABORT)
        self._roster.refresh()
        return known

    def expire(self, now: float) -> None:
        """End with an error what ran out of time, whether it waits or runs. now: seconds on the engine's clock."""
        for request_id in self._deadlines.take_passed(now):
            message = "the request's deadline passed"
            self._roster.finish_request(request_id, FinishReason.ERROR, message, DEADLINE_EXCEEDED)
        self._roster.refresh()

    def finish_choice(self, request_id: str, choice: int) -> bool:
        """End one choice that has drawn a token. False if there is no such choice."""
        known = self._roster.finish_choice(request_id, choice, FinishReason.ABORT)
        self._roster.refresh()
        return known

    def preempt_all(self, now: float) -> None:
        """Send all that runs back to wait: its tokens are kept, its blocks are not. now: seconds on the clock."""
        for _ in range(len(self._roster.running)):
            self._waits.preempted(self._roster.preempt(now).request)
            self._num_preempted += 1
        self._roster.refresh()

    def mark(self, sequence: Sequence, error: Exception) -> None:
        """Have the whole request of `sequence` end with ERROR when its step is taken in, which comes next."""
        self._boundary.mark(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End the whole request of `sequence` with ERROR."""
        self._boundary.mark(sequence, error)
        self._boundary.bury()
        self._roster.refresh()

    def take_finished(self) -> list[Finish]:
        """Return what ended since the last call."""
        return self._roster.take_finished()

    def unreported(self, schedule: Schedule) -> list[Sequence]:
        """Return those who left since the step was launched and whose end is still to be reported."""
        return self._roster.unreported(schedule.gone) if schedule.gone else []

    def batch(self) -> tuple[list[Sequence], Index]:
        """Return the running sequences, which hold all blocks, and their slots."""
        return self._roster.running, self._roster.slots

    # ---- before the step ----------------------------------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """Whether a step that was launched is still to be taken in."""
        return bool(self._roster.in_flight)

    def schedule(self) -> Schedule | None:
        """Choose the tokens of the next step; None when there is nothing to compute, or not yet."""
        roster = self._roster
        if roster.in_flight and (held := held_by(roster.in_flight[-1])):
            self.hold(held)
            return None
        query_lens = self._share_budget()
        if roster.in_flight and lacks_blocks(roster, self._rows, query_lens):
            self.hold(Hold.BLOCKS)
            return None
        grown = self._make_room(query_lens)
        if roster.waiting and not roster.stale:
            query_lens = self._newcomers.admit(query_lens)
        if roster.stale:
            query_lens = query_lens[[s.status is SequenceStatus.RUNNING for s in roster.running]]
            roster.refresh()
        self._look_where_in_doubt()
        return self._planner.plan(query_lens, grown) if roster.running else None

    def hold(self, reason: Hold) -> None:
        """Note that the next step waits for the results of the one that runs."""
        logger.debug("a step waits for the one before it: %s", reason.value)
        self._num_held += 1

    def _share_budget(self) -> Ints:
        """Return how many tokens each running sequence computes, 0 if its last one is being drawn. [running]."""
        roster, tables, count = self._roster, self._tables, len(self._roster.running)
        if not roster.prefilling and count <= self._budget and not self._waits.any_starved:
            if not roster.in_flight:
                return self._ones[:count]
            return (tables.num_tokens[roster.slots] < tables.limits[roster.slots]).astype(np.int32)
        num_tokens = tables.num_tokens[roster.slots]
        left = num_tokens - tables.num_computed[roster.slots]
        if roster.in_flight:
            left[num_tokens >= tables.limits[roster.slots]] = 0
        wanted = np.minimum(left, self._chunk)
        decodes_first = np.argsort(left > 1, kind="stable")
        served = wanted[decodes_first]
        ends = np.cumsum(served)
        query_lens = np.empty_like(wanted)
        query_lens[decodes_first] = np.clip(self._budget - (ends - served), 0, served)
        if served.sum() > self._budget or self._waits.any_starved:
            starved = (query_lens < np.minimum(left, 1)).nonzero()[0].tolist()
            self._waits.starved(roster.running[row].request for row in starved)
        return query_lens

    def _make_room(self, query_lens: Ints) -> Index:
        """Give every row the blocks that it writes to, preempting where there are none. Returns rows that grew."""
        roster, tables = self._roster, self._tables
        for sequence in list(roster.tail_sharers):
            if query_lens[roster.running.index(sequence)]:
                self._boundary.guard(sequence, self._part_tail, sequence)
        self._boundary.bury()
        seq_lens = tables.num_computed[roster.slots] + query_lens
        short = (seq_lens > tables.capacity[roster.slots]).nonzero()[0]
        if not short.size:
            return short
        if not roster.prefilling and not roster.stale and short.size <= self._rows.blocks.num_available:
            self._rows.grow_by_one([roster.running[row] for row in short.tolist()], roster.slots[short])
            return short
        for sequence, length in [(roster.running[row], int(seq_lens[row])) for row in short.tolist()]:
            if sequence.status is SequenceStatus.RUNNING:
                self._boundary.guard(sequence, self._grow, sequence, length)
        self._boundary.bury()
        return short

    def _part_tail(self, sequence: Sequence) -> None:
        position = sequence.num_computed_tokens
        if self._free_blocks(sequence, lambda: int(self._rows.shares_block(sequence, position))):
            self._rows.part(sequence, position)
            del self._roster.tail_sharers[sequence]

    def _grow(self, sequence: Sequence, length: int) -> None:
        wanted = self._rows.blocks_for(length) - len(sequence.block_table)
        if self._free_blocks(sequence, lambda: wanted):
            self._rows.grow(sequence, length)

    def _free_blocks(self, sequence: Sequence, wanted: Callable[[], int]) -> bool:
        """Preempt until `wanted` blocks are available. False if `sequence` itself had to go."""
        while sequence.status is SequenceStatus.RUNNING and self._rows.blocks.num_available < wanted():
            self._waits.preempted(self._roster.preempt(self._waits.now).request)
            self._num_preempted += 1
        return sequence.status is SequenceStatus.RUNNING

    def take_begun(self) -> list[Request]:
        """Return the requests that steps were scheduled for since the last call, and none before."""
        begun = self._newcomers.begun
        if begun:
            self._newcomers.begun = []
        return begun

    # ---- after the step -----------------------------------------------------------------------------------------

    def advance(self, schedule: Schedule) -> None:
        """Count what a step that was launched computes and draws."""
        self._num_ahead += self.is_ahead
        self._updater.advance(schedule)

    def land(self, schedule: Schedule, token_ids: Ints, failed: Mapping[int, Exception] = NO_FAILURES) -> None:
        """Take in a step that was run: `token_ids` are those of `schedule.samples`; rows `failed` end in an error."""
        self._num_generated += len(schedule.kept_samples()) if schedule.gone else len(schedule.samples)
        self._updater.land(schedule, token_ids, failed)
        self._look_where_in_doubt()

    def drop(self, schedule: Schedule) -> None:
        """Forget a step in flight whose sequences have all left."""
        self._roster.forget(schedule)

    def note_births(self, now: float) -> None:
        """Note who drew a first token in the step that was taken in last. now: when it had run, in seconds."""
        if self._roster.unborn:
            self._roster.note_births(now)

    # ---- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the figures as they are now."""
        roster, blocks, arrivals = self._roster, self._rows.blocks, self._newcomers.arrivals
        prefilling = 0
        for sequence in roster.prefilling:
            prefilling += sequence.num_tokens - sequence.num_computed_tokens
        return EngineStats(
            num_running=len(roster.running),
            num_waiting=len(roster.waiting),
            kv_blocks_total=blocks.num_blocks - 1,
            kv_blocks_free=blocks.num_free,
            kv_blocks_cached=blocks.num_cached,
            prefix_query_tokens=arrivals.prefix_query_tokens,
            prefix_hit_tokens=arrivals.prefix_hit_tokens,
            preemptions=self._num_preempted,
            prompt_tokens=arrivals.prompt_tokens,
            generated_tokens=self._num_generated,
            outstanding_tokens=roster.waiting.num_tokens + prefilling,
            steps_ahead=self._num_ahead,
            steps_held=self._num_held,
            waits_since=roster.waiting.waits_since(),
        )

    def _look_where_in_doubt(self) -> None:
        """Make sure that a bug of ours which ended a request left all others whole. Raises `IntegrityError`."""
        if self._boundary.in_doubt:
            self.check_integrity()
            self._boundary.in_doubt = False

    def check_integrity(self) -> None:
        """Check every invariant of queues, rows and blocks. Between steps only. Raises `IntegrityError`."""
        self._roster.check_integrity()
