"""From how many tokens each running sequence computes to the schedule of a step."""

from __future__ import annotations

import numpy as np

from engine.report import Ints
from engine.scheduler.roster import Roster
from engine.scheduler.rows import Rows
from engine.scheduler.schedule import Index, Schedule


class Planner:
    """Lays out the rows of a step: what is computed, who draws, and what is wanted of prompts."""

    def __init__(self, roster: Roster, rows: Rows) -> None:
        self._roster = roster
        self._rows = rows
        self._tables = rows.tables
        self._counting: Index = np.arange(rows.tables.num_slots)
        self._pairs: Ints = np.stack([self._counting, self._counting], axis=1).astype(np.int32)

    def plan(self, query_lens: Ints, grown: Index) -> Schedule | None:
        """Return the schedule of the running sequences; None if none of them computes anything.

        query_lens: [running]; grown: rows with new blocks.
        """
        roster = self._roster
        sequences, slots, version = roster.running, roster.slots, roster.version
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
            decode=not roster.prefilling,
            changed_rows=grown if grown.size else None,
            copies=[(source, target) for target, source in self._rows.copies.items()],
        )
        if roster.prefilling:
            self._choose_samples(schedule)
        if roster.in_flight:
            schedule.carried = self._carry(schedule, roster.in_flight[-1])
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
        if any(sequence.reads_prompt for sequence in self._roster.prefilling):
            self._read_prompts(schedule)
            rows = rows[[schedule.sequences[row].request.pooling is None for row in rows.tolist()]]
        samples = [schedule.sequences[row] for row in rows.tolist()]
        schedule.version = 0
        schedule.num_tokens = int(schedule.query_lens.sum())
        schedule.sample_slots = schedule.slots[rows]
        schedule.forks = [leader for leader in samples if leader in self._roster.siblings]
        if schedule.forks:
            families = [[leader, *self._roster.siblings.get(leader, ())] for leader in samples]
            rows = np.repeat(rows, [len(family) for family in families])
            samples = [sequence for family in families for sequence in family]
            schedule.sample_slots = np.array([sequence.slot for sequence in samples], np.intp)
        schedule.samples, schedule.sample_rows = samples, rows

    def _read_prompts(self, schedule: Schedule) -> None:
        """Note what is wanted of prompts beside their next token."""
        for row, sequence in enumerate(schedule.sequences):
            if not sequence.reads_prompt or sequence.num_computed_tokens >= sequence.num_prompt_tokens:
                continue
            if sequence.request.pooling is not None:
                whole = schedule.seq_lens[row] == sequence.num_prompt_tokens
                if whole or sequence.request.pooling == "mean":
                    schedule.pooled.append((sequence, row))
            else:
                first = max(sequence.num_computed_tokens, sequence.num_scored_tokens - 1)
                beyond = min(int(schedule.seq_lens[row]), sequence.num_prompt_tokens - 1)
                if beyond > first:
                    schedule.scores.append((sequence, first, beyond))
