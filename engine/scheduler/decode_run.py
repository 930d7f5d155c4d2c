"""Decode steps of the same rows, one right after another: each is the one before it, one token on."""

from __future__ import annotations

import numpy as np

from engine.scheduler.schedule import Continued, FullBlocks, Schedule
from engine.scheduler.slots import Slots

ONE = np.ones(1, np.int32)  # arrays add faster than Python's numbers
ONE_PLACE = np.ones(1, np.intp)


class DecodeRun:
    """Plans decode steps from the one before, where `BatchState.plan` gathers all of them anew.

    Both give the same steps. A run goes on while the batch stays the same, and until a sequence comes to its limit.
    For each step `grow` comes first, then `plan`.

    last: the step planned last.
    """

    def __init__(self, first: Schedule, slots: Slots) -> None:
        """first: a decode step that was launched, and no other was planned since."""
        tables = slots.tables
        self.last = first
        self._slots = slots
        self._full = slots.full_blocks(first.sequences, first.slots, first.seq_lens)
        self._places = first.slots * tables.tokens_per_slot + first.seq_lens  # of the tokens that `last` draws
        self._longest = int(first.seq_lens.max())
        # Steps in which no sequence draws the token that ends it.
        self._num_left = int((tables.limits[first.slots] - first.seq_lens).min()) - 2
        self._progress = np.zeros_like(tables.progress)
        self._progress[:, first.slots] = 1
        self._new_blocks = slots.no_blocks

    @property
    def goes_on(self) -> bool:
        """Whether no sequence comes to its limit in the next step, and the blocks that it needs are there."""
        return self._num_left > 0 and len(self._full.rows) <= self._slots.pool.num_available

    def grow(self) -> FullBlocks:
        """Give a block to each sequence that needs one for the next step; return the full ones before these."""
        full = self._full
        if len(full.rows):
            self._new_blocks = self._slots.grow_by_one(full.sequences, full.slots)
        return full

    def plan(self) -> Schedule:
        """Return the next step."""
        before, grown = self.last, self._full
        seq_lens = before.seq_lens + ONE
        places = self._places + ONE_PLACE
        full = self._slots.full_blocks(before.sequences, before.slots, seq_lens)
        self._longest += 1
        continued = Continued(self._places, places, grown, self._new_blocks, full, self._longest, self._progress)
        self.last = Schedule(
            before.sequences,
            before.slots,
            before.query_lens,
            before.seq_lens,
            seq_lens,
            before.sequences,
            before.sample_rows,
            before.slots,
            seq_lens,
            before.num_tokens,
            before.version,
            decode=True,
            changed_rows=grown.rows if len(grown.rows) else None,
            continued=continued,
        )
        self._full, self._places = full, places
        self._num_left -= 1
        return self.last
