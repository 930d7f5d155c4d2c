"""Every live sequence and its state: waiting, running, or ended and not yet reported."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.report import Finish, Ints
from engine.request import FinishReason, GrammarState, Request, Sequence, SequenceStatus
from engine.scheduler.decode_run import DecodeRun
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.slots import Slots
from engine.scheduler.waiting import WaitingQueue


class BatchState:
    """The state of all sequences, and the only one that changes it; the scheduler decides what happens to which.

    With n > 1 only the leader (choice 0) waits and prefills; its siblings have slots from the leader's admission on,
    and start to run when it forks. Others read these attributes and change none of them:

    running: in order of admission. It is replaced, never changed in place, for reports hold on to it.
    running_slots / version: of `running`, and a number that changes with it.
    stale: whether a sequence of `running` has left; `refresh` drops it.
    siblings: of leaders that have not forked.
    prefilling: running, with more than the last token left to compute, or with siblings to fork.
    tail_sharers: forked in the middle of a block, and have not written to it since.
    in_flight: steps that were launched and not collected yet, in order. `Sequence.num_tokens` counts a token for each
        row that they draw for.
    """

    def __init__(self, slots: Slots, by_priority: bool) -> None:
        self.running: list[Sequence] = []
        self.running_slots: Index = np.zeros(0, np.intp)
        self.version = 1
        self.stale = False
        self.waiting = WaitingQueue()
        self.siblings: dict[Sequence, list[Sequence]] = {}
        self.prefilling: dict[Sequence, None] = {}
        self.tail_sharers: dict[Sequence, None] = {}
        self.in_flight: list[Schedule] = []
        self._launched: Schedule | None = None  # the last one, unless another was planned since
        self._run: DecodeRun | None = None
        self._slots = slots
        self._tables = slots.tables
        self._by_priority = by_priority
        self._families: dict[str, list[Sequence]] = {}  # live sequences of each request
        self._before_first: list[Sequence] = []  # started, and without a token drawn here yet; some ended since
        self._ended: list[Finish] = []
        self._num_added = 0
        self._counting: Index = np.arange(self._tables.num_slots)
        self._pairs: Ints = np.stack([self._counting, self._counting], axis=1).astype(np.int32)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._families

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to run or to report."""
        return bool(self._families or self._ended)

    def holds(self, request_id: str, number: int) -> bool:
        """Whether the request that `add` gave this number is alive, not another one with its id."""
        family = self._families.get(request_id)
        return family is not None and family[0].number == number

    def add(self, request: Request, now: float, grammars: Mapping[int, GrammarState]) -> int:
        """Let a checked request wait; return its number. now: its arrival in seconds, unless it brings its own.

        grammars: choice -> where its output stands in the grammar that it must match.
        """
        arrival = now if request.arrival_time is None else request.arrival_time
        if request.resume is None:
            family = [self._sequence(request, index, (), arrival, now) for index in range(request.params.n)]
            if len(family) > 1:
                self.siblings[family[0]] = family[1:]
            waiting = family[:1]
        else:
            family = [self._sequence(request, *choice, arrival, now) for choice in sorted(request.resume.items())]
            for sequence in family[1:]:
                sequence.num_scored_tokens = sequence.num_prompt_tokens  # the first one reports the prompt
            waiting = family
        for sequence in family:
            sequence.grammar = grammars.get(sequence.index)
            sequence.num_matched = sequence.num_output_tokens
        number, self._num_added = self._num_added, self._num_added + 1
        self._families[request.request_id] = family.copy()
        for sequence in waiting:
            self.waiting.push(sequence)
        return number

    def admit(self, sequence: Sequence, prefix: list[int], limit: int, most: int, now: float) -> int:
        """Let the first waiting sequence run, behind all others; return how many tokens it computes in this step.

        prefix: cached blocks that it starts with. limit: tokens at which it ends. most: tokens that it may compute at
        most. now: seconds on the engine's clock.
        """
        self._slots.place(sequence, self.siblings.get(sequence, ()), prefix, limit)
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        grant = min(known - computed, most)
        if (states := self._slots.states) is not None:
            grant = int(states.cut(np.array([grant], np.int32), np.array([computed], np.int32))[0])
        self._slots.grow(sequence, computed + grant)
        self.waiting.remove(sequence)
        if sequence.started_at is None:
            sequence.started_at = now
            self._before_first.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        if known - computed > 1 or sequence in self.siblings or sequence.request.pooling is not None:
            self.prefilling[sequence] = None
        self._set_running([*self.running, sequence], np.append(self.running_slots, sequence.slot))
        return grant

    def fork(self, leader: Sequence) -> None:
        """Let the siblings of `leader`, whose prompt is computed, run beside it on shared blocks."""
        siblings = self.siblings.pop(leader)
        for sibling in siblings:
            self._slots.fork(leader, sibling)
            sibling.num_scored_tokens = leader.num_scored_tokens  # the leader reported the prompt for all
            sibling.status = SequenceStatus.RUNNING
            sibling.started_at = leader.started_at
        if leader.num_computed_tokens % self._slots.pool.block_size:
            self.tail_sharers.update(dict.fromkeys([leader, *siblings]))
        place = self.running.index(leader) + 1
        slots = np.insert(self.running_slots, place, [sibling.slot for sibling in siblings])
        self._set_running([*self.running[:place], *siblings, *self.running[place:]], slots)
        self._before_first.extend(siblings)

    def part_tail(self, sequence: Sequence) -> None:
        """Give `sequence` its own copy of the block it writes to next. Raises `ValueError` without a free block."""
        self._slots.part(sequence, sequence.num_computed_tokens)
        del self.tail_sharers[sequence]

    def preempt(self, now: float) -> Sequence:
        """Send the youngest (least urgent) running sequence back to wait; its tokens are kept, its blocks are not.

        now: seconds on the engine's clock.
        """
        running = SequenceStatus.RUNNING  # an enum's members are slow to look up
        victim = max((s for s in self.running if s.status is running), key=lambda s: s.order)
        known = victim.num_tokens - self._num_in_flight(victim)
        outputs = self._tables.outputs(victim.slot, known)
        victim.status = SequenceStatus.WAITING
        victim.preemptions += 1
        victim.queued_at = now
        self._vacate(victim)
        victim.resume_tokens = outputs
        for sibling in self.siblings.get(victim, ()):
            self._vacate(sibling)
        self.waiting.push(victim)
        return victim

    def finish(self, sequence: Sequence, reason: FinishReason, message: str = "", code: str = "") -> None:
        """End a sequence, free what it holds, and note its one `Finish`."""
        self.waiting.remove(sequence)
        self.siblings.pop(sequence, None)
        self._vacate(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        request_id = sequence.request.request_id
        family = self._families[request_id]
        family.remove(sequence)
        if not family:
            del self._families[request_id]
        self._ended.append(Finish(sequence, reason, message, code))

    def note_first_tokens(self, now: float) -> None:
        """Note which sequences drew their first token, or gave their state, in the step that ran until `now`."""
        if not self._before_first:
            return
        waiting = []
        for sequence in self._before_first:
            if sequence.finish_reason is FinishReason.ERROR:
                continue
            known = sequence.num_output_tokens - self._num_in_flight(sequence)
            if known > len(sequence.resume_tokens) or sequence.finish_reason is FinishReason.STOP:
                sequence.first_token_at = now
            elif sequence.finish_reason is None:
                waiting.append(sequence)
        self._before_first = waiting

    def finish_request(self, request_id: str, reason: FinishReason, message: str = "", code: str = "") -> None:
        """End whatever of a request is alive."""
        for sequence in self._families.get(request_id, []).copy():
            self.finish(sequence, reason, message, code)

    def finish_choice(self, request_id: str, choice: int, reason: FinishReason) -> bool:
        """End one choice that has drawn a token; its request's others go on. False if there is no such choice."""
        for sequence in self._families.get(request_id, ()):
            if sequence.index == choice and sequence.num_output_tokens > self._num_in_flight(sequence):
                self.finish(sequence, reason)
                return True
        return False

    def refresh(self) -> NDArray[np.bool_] | None:
        """Drop from `running` those that have left; return which stayed, None where all did."""
        if not self.stale:
            return None
        status = SequenceStatus.RUNNING
        stays = np.array([sequence.status is status for sequence in self.running], np.bool_)
        self._set_running(list(compress(self.running, stays.tolist())), self.running_slots[stays])
        self.stale = False
        return stays

    def decode_run(self) -> DecodeRun | None:
        """Return the run of decode steps that the next step goes on with; None where it has to be planned anew.

        Asked for once before each step: it is not given again until a step was launched.
        """
        before = self._launched
        if before is None or before.version != self.version or not before.decode or before.most_draws > 1:
            return None
        if self._run is None or self._run.last is not before:
            self._run = DecodeRun(before, self._slots)
        if not self._run.goes_on:
            return None
        self._launched = None
        return self._run

    def plan_on(self, run: DecodeRun) -> Schedule:
        """Return the next step of `run`, which `decode_run` gave and whose sequences are all that run."""
        schedule = run.plan()
        self._complete(schedule)
        return schedule

    def plan(self, query_lens: Ints, grown: Index, most_draws: int) -> Schedule | None:
        """Return the schedule of the running sequences; None if none of them computes anything.

        query_lens: tokens that each computes, [running]. grown: rows with new blocks. most_draws: tokens that a row
        may draw at most.
        """
        self._launched = None
        sequences, slots, version = self.running, self.running_slots, self.version
        if np.count_nonzero(query_lens) < len(query_lens):
            kept = query_lens.nonzero()[0]
            if not kept.size:
                return None
            sequences, slots, version = [sequences[row] for row in kept.tolist()], slots[kept], 0
            query_lens = query_lens[kept]
        num_computed = self._tables.num_computed[slots]
        seq_lens = num_computed + query_lens
        schedule = Schedule(
            sequences=sequences,
            slots=slots,
            query_lens=query_lens,
            num_computed=num_computed,
            seq_lens=seq_lens,
            samples=sequences,
            sample_rows=self._counting[: len(sequences)],
            sample_slots=slots,
            sample_positions=seq_lens,
            num_tokens=len(sequences),
            version=version,
            decode=not self.prefilling,
            changed_rows=grown if grown.size else None,
            copies=[(source, target) for target, source in self._slots.copies.items()],
            most_draws=most_draws,
        )
        if self.prefilling:
            rows = (seq_lens == self._tables.num_tokens[slots]).nonzero()[0]
            if any(sequence.reads_prompt for sequence in self.prefilling):
                schedule.read_prompts()
                rows = rows[[sequences[row].request.pooling is None for row in rows.tolist()]]
            schedule.choose_samples(rows, self.siblings)
        self._complete(schedule)
        return schedule

    def launch(self, schedule: Schedule) -> None:
        """Count the tokens of a step that was launched as computed, and one for each row that it draws for."""
        tables = self._tables
        self._slots.copies.clear()
        if self._slots.states is not None:
            self._slots.states.launch(schedule.slots)
        if schedule.continued is not None:
            progress = tables.progress
            progress += schedule.continued.progress
        else:
            tables.num_computed[schedule.slots] = schedule.seq_lens
            if self.prefilling:
                for sequence in [s for s in self.prefilling if s.num_computed_tokens == s.num_tokens]:
                    del self.prefilling[sequence]
            tables.num_tokens[schedule.sample_slots] = schedule.sample_positions + 1
        self.in_flight.append(schedule)
        self._launched = schedule

    def extend(self, schedule: Schedule, rows: Index, num_more: Ints) -> None:
        """Count tokens that samples `rows` drew beyond the first; these are left to compute beside the last one."""
        self._tables.num_tokens[schedule.sample_slots[rows]] += num_more
        self.prefilling.update({schedule.samples[row]: None for row in rows.tolist()})

    def land(self, schedule: Schedule) -> None:
        """Note that a step is not in flight any more."""
        if self.in_flight.pop(0) is not schedule:
            raise IntegrityError("a step is collected before one that was launched earlier")

    def unreported(self, some: set[Sequence]) -> list[Sequence]:
        """Return those of `some` that ended since `take_finished` was called."""
        return [finish.sequence for finish in self._ended if finish.sequence in some]

    def take_finished(self) -> list[Finish]:
        """Return what ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def lacks_blocks(self, query_lens: Ints) -> bool:
        """Whether a sequence would have to be preempted so that the running compute so many tokens. [running]."""
        size, available = self._slots.pool.block_size, self._slots.pool.num_available
        sharers = len(self.tail_sharers)
        if len(query_lens) + int(query_lens.sum()) // size + sharers <= available:
            return False  # each takes a block more than its tokens fill, at most
        seq_lens = self._tables.num_computed[self.running_slots] + query_lens
        short = seq_lens - self._slots.capacity(self.running_slots)
        return int((-(-short.clip(min=0) // size)).sum()) + sharers > available

    def check_integrity(self) -> None:
        """Check every sequence, queue and slot. Between steps only. Raises `IntegrityError`. O(everything)."""
        live = [sequence for family in self._families.values() for sequence in family]
        unforked = [sibling for siblings in self.siblings.values() for sibling in siblings]
        waiting = [sequence for sequence in live if sequence in self.waiting]
        if sorted(s.order for s in live) != sorted(s.order for s in [*self.running, *waiting, *unforked]):
            raise IntegrityError("live sequences are not those that run, wait or follow a leader, each once")
        if any(s.slot >= 0 for s in waiting) or any(s.slot < 0 for s in self.running):
            raise IntegrityError("a waiting sequence holds memory, or a running one has none")
        if self.running_slots.tolist() != [s.slot for s in self.running]:
            raise IntegrityError("the slots of the running sequences are out of date")
        if not {*self.prefilling, *self.tail_sharers}.issubset(self.running):
            raise IntegrityError("a sequence that left is still expected to compute or to write")
        self.waiting.check_integrity()
        self._slots.check_integrity([s for s in live if s.slot >= 0])
        self._check_sharing()

    def _check_sharing(self) -> None:
        pool = self._slots.pool
        for sequence in self.running:
            writable = sequence.block_table[sequence.num_computed_tokens // pool.block_size :]
            if sequence not in self.tail_sharers and any(map(pool.is_shared, writable)):
                raise IntegrityError(f"sequence {sequence.order} would write to a block that others hold")

    def _sequence(self, request: Request, index: int, log: tuple[int, ...], arrival: float, now: float) -> Sequence:
        prompt = len(request.prompt_token_ids)
        urgency = request.priority if self._by_priority else 0
        return Sequence(
            request,
            index,
            num_prompt_tokens=prompt,
            num_known=prompt + len(log),
            resume_tokens=list(log),
            arrival_time=arrival,
            number=self._num_added,
            order=(urgency, arrival, self._num_added, index),
            num_scored_tokens=request.num_scored_tokens,
            queued_at=now,
        )

    def _num_in_flight(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are counted that steps in flight draw."""
        return sum(schedule.draws_for(sequence) for schedule in self.in_flight)

    def _vacate(self, sequence: Sequence) -> None:
        """Take back what `sequence` holds; steps in flight bring it nothing any more.

        Its blocks may go to others at once: what such a step still writes to them is written before anything that a
        later step puts there, and no block that it writes to can be found.
        """
        self._slots.leave(sequence)
        sequence.num_known -= self._num_in_flight(sequence)
        for schedule in self.in_flight:
            schedule.gone.add(sequence)
        self.prefilling.pop(sequence, None)
        self.tail_sharers.pop(sequence, None)
        self.stale = True

    def _complete(self, schedule: Schedule) -> None:
        """Add to a schedule what it takes from the step before it, and what is done with states."""
        if self.in_flight:
            schedule.carried = self._carried(schedule, self.in_flight[-1])
        if (states := self._slots.states) is not None:
            schedule.states = states.plan(schedule, self.siblings, self._slots.pool.enable_prefix_caching)

    def _carried(self, schedule: Schedule, before: Schedule) -> Ints:
        if schedule.version and schedule.version == before.version:
            return self._pairs[: len(schedule.sequences)]  # both decode: all rows, in order
        return schedule.carried_from(before, self._tables.num_slots)

    def _set_running(self, running: list[Sequence], slots: Index) -> None:
        self.running = running
        self.running_slots = slots
        self.version += 1
