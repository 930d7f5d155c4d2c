"""What becomes of the sequences of a step after it was run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from engine.boundary import Boundary
from engine.errors import GrammarError
from engine.report import Ints
from engine.request import FinishReason, Sequence
from engine.roster import Roster
from engine.rows import Rows
from engine.schedule import Schedule
from engine.stops import StopTokens

logger = logging.getLogger(__name__)


class Updater:
    """Counts, names, forks, appends, ends: vectorised over rows, with Python loops only where something happens."""

    def __init__(self, rows: Rows, roster: Roster, stops: StopTokens, boundary: Boundary) -> None:
        self._rows = rows
        self._tables = rows.tables
        self._roster = roster
        self._stops = stops
        self._boundary = boundary
        self._shift = rows.blocks.block_size.bit_length() - 1
        self._seals = rows.blocks.enable_prefix_caching

    def update(self, schedule: Schedule, token_ids: Ints, failed: Mapping[int, Exception]) -> None:
        """Take in a step that was run: `token_ids` are those of `schedule.samples`; requests of rows `failed` end."""
        self._rows.copies.clear()
        for row, error in failed.items():
            self._boundary.mark(schedule.samples[row], error)
        self._advance(schedule)
        for leader in schedule.forks:
            self._boundary.guard(leader, self._roster.fork, leader)
        for sequence, row in schedule.pooled:
            whole = schedule.seq_lens[row] == sequence.num_prompt_tokens
            if whole and not self._boundary.is_marked(sequence):
                self._boundary.guard(sequence, self._roster.finish, sequence, FinishReason.STOP)
        self._append(schedule, token_ids, failed)
        self._boundary.bury()
        self._roster.refresh()

    def _advance(self, schedule: Schedule) -> None:
        """Count the step's tokens as computed, and name the blocks that they filled."""
        self._tables.num_computed[schedule.slots] = schedule.seq_lens
        if self._seals:
            self._seal(schedule)
        if schedule.decode:
            return  # `_append` counts both, in one go over the sequences
        for sequence, computed in zip(schedule.sequences, schedule.seq_lens.tolist(), strict=True):
            sequence.num_computed_tokens = computed
        prefilling = self._roster.prefilling
        for sequence in [s for s in prefilling if s.num_computed_tokens == s.num_tokens]:
            del prefilling[sequence]

    def _seal(self, schedule: Schedule) -> None:
        filled = ((schedule.seq_lens >> self._shift) > (schedule.num_computed >> self._shift)).nonzero()[0]
        if not filled.size:
            return
        decoded = schedule.query_lens[filled] == 1
        together, singly = filled[decoded], filled[~decoded].tolist()
        try:
            sequences = [schedule.sequences[row] for row in together.tolist()]
            self._rows.seal_last(sequences, schedule.slots[together], schedule.seq_lens[together])
        except Exception:
            logger.warning("blocks could not be sealed together and are sealed one by one", exc_info=True)
            singly = filled.tolist()
        for row in singly:
            sequence = schedule.sequences[row]
            computed = int(schedule.num_computed[row]), int(schedule.seq_lens[row])
            self._boundary.guard(sequence, self._rows.seal, sequence, *computed)

    def _append(self, schedule: Schedule, token_ids: Ints, failed: Mapping[int, Exception]) -> None:
        """Write the drawn tokens behind their sequences, and end those that are done."""
        tables, slots = self._tables, schedule.sample_slots
        positions = schedule.seq_lens if schedule.decode else schedule.seq_lens[schedule.sample_rows]
        tables.flat_tokens[slots * tables.context_len + positions] = token_ids
        num_tokens = positions + 1
        tables.num_tokens[slots] = num_tokens
        if schedule.decode:
            for sequence in schedule.samples:
                sequence.num_computed_tokens = known = sequence.num_tokens
                sequence.num_tokens = known + 1
        else:
            for sequence in schedule.samples:
                sequence.num_tokens += 1
        for row in self._rows.structured[slots].nonzero()[0].tolist():
            if row not in failed:
                self._boundary.guard(schedule.samples[row], _accept, schedule.samples[row], int(token_ids[row]))
        ended = np.logical_or(num_tokens >= tables.limits[slots], self._stops.hits(token_ids))
        ended[list(failed)] = False  # they end with an error, whatever their token
        for row in ended.nonzero()[0].tolist():
            sequence = schedule.samples[row]
            self._boundary.guard(sequence, self._end_if_done, sequence, int(token_ids[row]))

    def _end_if_done(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        if self._boundary.is_marked(sequence):
            return  # its last token is there, but not all else that was asked for
        if token in self._stops.of(request) and sequence.num_output_tokens > request.params.min_tokens:
            sequence.stop_token = token
            self._roster.finish(sequence, FinishReason.STOP)
        elif sequence.num_tokens >= self._tables.limits[sequence.slot]:
            self._roster.finish(sequence, FinishReason.LENGTH)


def _accept(sequence: Sequence, token: int) -> None:
    if sequence.grammar is not None and not sequence.grammar.accept(token):
        raise GrammarError(f"token {token} was drawn although the grammar does not allow it")
