"""Decode steps of the same rows, one right after another: each is the one before it, one token on."""

from __future__ import annotations

import numpy as np

from engine.report import Ints
from engine.scheduler.schedule import ONE, ONE_PLACE, Continued, Index, RowBlocks, Schedule
from engine.scheduler.slots import Slots

NO_BLOCKS: Ints = np.zeros(0, np.int32)


class DecodeRun:
    """Plans decode steps from the one before, where `BatchState.plan` gathers all of them anew.

    Both give the same steps. A run goes on while the batch stays the same, until a sequence comes to its limit. For
    each step `grow` comes first, then `plan`.

    last: the step planned last.
    """

    def __init__(self, first: Schedule, slots: Slots) -> None:
        """first: a decode step that was launched; no other was planned since."""
        tables = slots.tables
        self.last = first
        self._slots = slots
        self._mask = tables.block_size - 1
        self._places = first.slots * tables.tokens_per_slot + first.seq_lens  # of the tokens that `last` draws
        self._longest = int(first.seq_lens.max())
        # Steps in which no sequence draws the token that ends it.
        self._num_left = int((tables.limits[first.slots] - first.seq_lens).min()) - 2
        self._progress = np.zeros_like(tables.progress)
        self._progress[:, first.slots] = 1
        # What fills a block fills the next one when all rows have moved on by a block: the blocks begun, by the step
        # modulo a block that fills them.
        self._begun: list[RowBlocks | None] = [None] * tables.block_size
        self._phase = 0  # of `last`
        self._full = self._grown = self._filled(first.seq_lens)  # by `last`
        self._new_blocks = NO_BLOCKS

    @property
    def goes_on(self) -> bool:
        """Whether no sequence comes to its limit in the next step, and the blocks that it needs are there."""
        return self._num_left > 0 and len(self._full.sequences) <= self._slots.pool.num_available

    def grow(self) -> Index:
        """Give a block to each sequence that needs one for the next step; return their rows."""
        grown = self._grown = self._begun[self._phase] = self._full.next()
        if grown.sequences:
            self._new_blocks = self._slots.grow_by_one(grown)
        return grown.rows

    def plan(self) -> Schedule:
        """Return the next step."""
        before, grown, places = self.last, self._grown, self._places
        seq_lens = before.seq_lens + ONE
        self._num_left -= 1
        self._longest += 1
        self._phase = (self._phase + 1) & self._mask
        self._places = places + ONE_PLACE
        self._full = self._begun[self._phase] or self._filled(seq_lens)
        known = Continued(places, self._places, grown, self._new_blocks, self._full, self._longest, self._progress)
        self.last = before.moved_on(seq_lens, known)
        return self.last

    def _filled(self, seq_lens: Ints) -> RowBlocks:
        """Return the blocks that a step fills. seq_lens: after it."""
        rows = (seq_lens & self._mask == 0).nonzero()[0]
        return self._slots.last_blocks(self.last.sequences, self.last.slots, seq_lens, rows)
