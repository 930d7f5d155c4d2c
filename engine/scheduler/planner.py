"""From how many tokens each running sequence computes to the schedule of a step."""

from __future__ import annotations

import numpy as np

from engine.report import Ints
from engine.scheduler.batch_state import BatchState
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.slots import Slots


class Planner:
    """Lays out the rows of a step: what is computed, who draws, and what is wanted of prompts.

    most_draws: tokens that a row may draw at most.
    """

    def __init__(self, batch: BatchState, slots: Slots, most_draws: int) -> None:
        self._batch = batch
        self._slots = slots
        self._tables = slots.tables
        self._most_draws = most_draws
        self._counting: Index = np.arange(slots.tables.num_slots)
        self._pairs: Ints = np.stack([self._counting, self._counting], axis=1).astype(np.int32)

    def plan(self, query_lens: Ints, grown: Index) -> Schedule | None:
        """Return the schedule of the running sequences; None if none of them computes anything.

        query_lens: [running]; grown: rows with new blocks.
        """
        batch = self._batch
        sequences, slots, version = batch.running, batch.running_slots, batch.version
        if not query_lens.all():
            kept = query_lens.nonzero()[0]
            if not kept.size:
                return None
            sequences, slots, version = [sequences[row] for row in kept.tolist()], slots[kept], 0
            query_lens = query_lens[kept]
        num_computed = self._tables.num_computed[slots]
        schedule = Schedule(
            sequences=sequences,
            slots=slots,
            query_lens=query_lens,
            num_computed=num_computed,
            seq_lens=num_computed + query_lens,
            samples=sequences,
            sample_rows=self._counting[: len(sequences)],
            sample_slots=slots,
            num_tokens=len(sequences),
            version=version,
            decode=not batch.prefilling,
            changed_rows=grown if grown.size else None,
            copies=[(source, target) for target, source in self._slots.copies.items()],
            most_draws=self._most_draws,
        )
        if batch.prefilling:
            self._choose_samples(schedule)
        if batch.in_flight:
            schedule.carried = self._carry(schedule, batch.in_flight[-1])
        return schedule

    def _carry(self, schedule: Schedule, before: Schedule) -> Ints:
        """Return which rows compute a token that the step `before` draws, and which of its samples that is."""
        if schedule.version and schedule.version == before.version:
            return self._pairs[: len(schedule.sequences)]  # both decode: all rows, in order
        sample_of = np.full(self._tables.num_slots, -1, np.int32)
        kept = before.kept_samples() if before.gone else self._counting[: len(before.samples)]
        sample_of[before.sample_slots[kept]] = kept
        samples = sample_of[schedule.slots]
        rows = (samples >= 0).nonzero()[0]
        return np.stack([rows, samples[rows]], axis=1).astype(np.int32)

    def _choose_samples(self, schedule: Schedule) -> None:
        """Let those draw whose last token is computed; a leader draws for its siblings too."""
        rows = (schedule.seq_lens == self._tables.num_tokens[schedule.slots]).nonzero()[0]
        if any(sequence.reads_prompt for sequence in self._batch.prefilling):
            _read_prompts(schedule)
            rows = rows[[schedule.sequences[row].request.pooling is None for row in rows.tolist()]]
        samples = [schedule.sequences[row] for row in rows.tolist()]
        schedule.version = 0
        schedule.num_tokens = int(schedule.query_lens.sum())
        schedule.sample_slots = schedule.slots[rows]
        schedule.forks = [leader for leader in samples if leader in self._batch.siblings]
        if schedule.forks:
            families = [[leader, *self._batch.siblings.get(leader, ())] for leader in samples]
            rows = np.repeat(rows, [len(family) for family in families])
            samples = [sequence for family in families for sequence in family]
            schedule.sample_slots = np.array([sequence.slot for sequence in samples], np.intp)
        schedule.samples, schedule.sample_rows = samples, rows


def _read_prompts(schedule: Schedule) -> None:
    """Note what is wanted of prompts beside their next token."""
    for row, sequence in enumerate(schedule.sequences):
        computed, beyond = int(schedule.num_computed[row]), int(schedule.seq_lens[row])
        if not sequence.reads_prompt or computed >= sequence.num_prompt_tokens:
            continue
        if sequence.request.pooling is not None:
            if beyond == sequence.num_prompt_tokens or sequence.request.pooling == "mean":
                schedule.pooled.append((sequence, row))
        else:
            first = max(computed, sequence.num_scored_tokens - 1)
            beyond = min(beyond, sequence.num_prompt_tokens - 1)
            if beyond > first:
                schedule.scores.append((sequence, first, beyond))
