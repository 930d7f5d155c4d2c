"""What becomes of the sequences of a step after it was run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from engine.errors import IntegrityError
from engine.report import Ints
from engine.request import FinishReason, Sequence
from engine.scheduler.boundary import Boundary
from engine.scheduler.roster import Roster
from engine.scheduler.rows import Rows
from engine.scheduler.schedule import Index, Schedule
from engine.scheduler.stops import StopTokens

logger = logging.getLogger(__name__)


class Updater:
    """Counts, names, forks, writes, ends: vectorised over rows, with Python loops only where something happens.

    What can be counted before a step has run is counted by `advance`, so that the next one can be planned while it
    runs; what needs its tokens is done by `land`. Both see each step once, in the order of the steps.
    """

    def __init__(self, rows: Rows, roster: Roster, stops: StopTokens, boundary: Boundary) -> None:
        self._rows = rows
        self._tables = rows.tables
        self._roster = roster
        self._stops = stops
        self._boundary = boundary
        self._shift = rows.blocks.block_size.bit_length() - 1
        self._seals = rows.blocks.enable_prefix_caching

    def advance(self, schedule: Schedule) -> None:
        """Count the tokens of a step that was launched as computed, and those that it draws as drawn."""
        tables = self._tables
        self._rows.copies.clear()
        tables.num_computed[schedule.slots] = schedule.seq_lens
        tables.num_tokens[schedule.sample_slots] = schedule.sample_positions + 1
        if schedule.decode:
            for sequence in schedule.samples:
                sequence.num_computed_tokens = known = sequence.num_tokens
                sequence.num_tokens = known + 1
        else:
            self._advance_prompts(schedule)
        self._roster.in_flight.append(schedule)

    def _advance_prompts(self, schedule: Schedule) -> None:
        for sequence, computed in zip(schedule.sequences, schedule.seq_lens.tolist(), strict=True):
            sequence.num_computed_tokens = computed
        prefilling = self._roster.prefilling
        for sequence in [s for s in prefilling if s.num_computed_tokens == s.num_tokens]:
            del prefilling[sequence]
        for sequence in schedule.samples:
            sequence.num_tokens += 1

    def land(self, schedule: Schedule, token_ids: Ints, failed: Mapping[int, Exception]) -> None:
        """Take in a step that was run: `token_ids` are those of `schedule.samples`; requests of rows `failed` end.

        failed: none of `schedule.gone`, who get nothing.
        """
        self._roster.forget(schedule)
        for row, error in failed.items():
            self._boundary.mark(schedule.samples[row], error)
        if self._seals:
            self._seal(schedule)
        for leader in schedule.forks:
            if leader not in schedule.gone:
                self._boundary.guard(leader, self._roster.fork, leader)
        for sequence, row in schedule.pooled:
            whole = schedule.seq_lens[row] == sequence.num_prompt_tokens
            if whole and sequence not in schedule.gone and not self._boundary.is_marked(sequence):
                self._boundary.guard(sequence, self._roster.finish, sequence, FinishReason.STOP)
        if schedule.gone:
            kept = schedule.kept_samples()
            samples = [schedule.samples[row] for row in kept.tolist()]
            positions, slots = schedule.sample_positions[kept], schedule.sample_slots[kept]
            self._write(samples, slots, positions, token_ids[kept])
        else:
            self._write(schedule.samples, schedule.sample_slots, schedule.sample_positions, token_ids)
        self._boundary.bury()
        self._roster.refresh()

    def _seal(self, schedule: Schedule) -> None:
        """Name the blocks that the step filled."""
        filled = ((schedule.seq_lens >> self._shift) > (schedule.num_computed >> self._shift)).nonzero()[0]
        if schedule.gone:
            filled = filled[[schedule.sequences[row] not in schedule.gone for row in filled.tolist()]]
        if not filled.size:
            return
        decoded = schedule.query_lens[filled] == 1
        together, singly = filled[decoded], filled[~decoded].tolist()
        try:
            sequences = [schedule.sequences[row] for row in together.tolist()]
            self._rows.seal_last(sequences, schedule.slots[together], schedule.seq_lens[together])
        except IntegrityError:
            raise
        except Exception:
            self._boundary.in_doubt = True
            logger.warning("blocks could not be sealed together and are sealed one by one", exc_info=True)
            singly = filled.tolist()
        for row in singly:
            sequence = schedule.sequences[row]
            computed = int(schedule.num_computed[row]), int(schedule.seq_lens[row])
            self._boundary.guard(sequence, self._rows.seal, sequence, *computed)

    def _write(self, samples: list[Sequence], slots: Index, positions: Ints, token_ids: Ints) -> None:
        """Put the drawn tokens at their positions, and end the sequences that are done."""
        tables = self._tables
        tables.flat_tokens[slots * tables.context_len + positions] = token_ids
        num_tokens = positions + 1
        if self._rows.any_structured:
            self._match(samples, slots, token_ids, num_tokens)
        ended = np.logical_or(num_tokens >= tables.limits[slots], self._stops.hits(token_ids))
        for row in ended.nonzero()[0].tolist():
            sequence = samples[row]
            self._boundary.guard(sequence, self._end_if_done, sequence, int(token_ids[row]), int(num_tokens[row]))

    def _match(self, samples: list[Sequence], slots: Index, token_ids: Ints, num_tokens: Ints) -> None:
        """Let grammars know what was drawn, where they do not know it of the step after."""
        for row in self._rows.structured[slots].nonzero()[0].tolist():
            sequence = samples[row]
            if not self._boundary.is_marked(sequence):
                number = int(num_tokens[row]) - sequence.num_prompt_tokens
                self._boundary.guard_own(sequence, sequence.match, int(token_ids[row]), number)

    def _end_if_done(self, sequence: Sequence, token: int, num_tokens: int) -> None:
        """End `sequence` if its last token was drawn: `token`, with which it has `num_tokens`."""
        request = sequence.request
        if self._boundary.is_marked(sequence):
            return  # its last token is there, but not all else that was asked for
        num_outputs = num_tokens - sequence.num_prompt_tokens
        if token in self._stops.of(request) and num_outputs > request.params.min_tokens:
            sequence.stop_token = token
            self._roster.finish(sequence, FinishReason.STOP)
        elif num_tokens >= self._tables.limits[sequence.slot]:
            self._roster.finish(sequence, FinishReason.LENGTH)
