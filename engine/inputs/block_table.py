"""The block table outside the scheduler: who holds a copy, and why.

- `engine.scheduler.slots.SlotTables.blocks`, a row a slot, is the table: the scheduler writes it and nothing else.
- `BlockRows` keeps the rows of the last step in the order in which attention reads them, so that a decode step reads
  again only the rows that grew.
- Each rank of a group, and each rank on a GPU, has one `RankTable`: what that rank knows of the table. A step is sent
  as the entries that are new, found once, on rank 0, by comparing; the other ranks take them in.
- `engine.inputs.step_buffers.StepBuffers` has that table on the GPU, where CUDA graphs read it: a step's rows are
  taken from there, so that a decode step sends a slot a row and a few new entries.

A rank alone on a CPU has no copy: its attention reads the rows of the builder.
"""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from engine.report import Ints, StepInputs
from engine.scheduler.schedule import Continued, Schedule
from engine.scheduler.slots import SlotTables

# Each row begins at a multiple of so many int32, as kernels are compiled for: 64 bytes.
ALIGNMENT = 16


class BlockRows:
    """The rows of the block table that a step reads, in its order and as wide as the longest."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._rows: Ints = np.zeros((0, 0), np.int32)
        self._version = 0

    def read(self, schedule: Schedule) -> Ints:
        """Return the rows of any step, [num_reqs, width]; only those that changed are read again."""
        width = self._width(int(schedule.seq_lens.max()))
        changed = schedule.changed_rows
        if not schedule.version or schedule.version != self._version or self._rows.shape[1] != width:
            self._rows = self._tables.blocks[schedule.slots, :width]
            self._version = schedule.version
        elif changed is not None:
            self._rows[changed] = self._tables.blocks[schedule.slots[changed], :width]
        return self._rows

    def append(self, schedule: Schedule, continued: Continued) -> Ints:
        """As `read`, of a step that moves the rows of the one read last on by one token."""
        width, grown = self._width(continued.longest), continued.grown
        if self._rows.shape[1] != width:
            self._rows = self._tables.blocks[schedule.slots, :width]
        elif grown.sequences:
            self._rows[grown.rows, grown.columns] = continued.new_blocks
        return self._rows

    def _width(self, longest: int) -> int:
        """Return how many blocks hold `longest` tokens."""
        return -(-longest >> self._tables.shift)


class RankTable:
    """What a rank knows of the block table, [rows, width] int32, zero at first; the same on all ranks after a step.

    Rank 0 asks for the `changes` of a step, the others take them in with `apply`. What is sent is found by comparing,
    so that no step needs to know of the one before: one that was prepared and never run, or prepared twice, does no
    harm.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.table: Ints = np.zeros((rows, width), np.int32)
        self._flat: Ints = self.table.reshape(-1)  # a view

    @classmethod
    def of(cls, config: EngineConfig) -> RankTable:
        """Return one with room for any step. config: resolved, the same on all ranks."""
        # The warm-up step may have more sequences than any other.
        rows = max(config.max_num_seqs, -(-config.token_budget // config.context_len))
        return cls(rows, aligned(config.max_blocks_per_seq))

    def changes_of(self, inputs: StepInputs) -> Ints:
        """Return what a step's block tables change, as `changes` does, and take it in."""
        return self.changes(rows_of(inputs.slots, inputs.num_reqs), inputs.block_tables)

    def changes(self, rows: Ints, tables: Ints) -> Ints:
        """Return the entries of `tables` that are not as in `rows` of the table, and take them in.

        rows: [num_reqs], none twice. tables: [num_reqs, some columns, at most the width].
        Returns [2, num_changes]: places in the flat table, ascending within a row, and values.
        """
        count = tables.shape[1]
        changed = np.flatnonzero(self.read(rows, count) != tables)
        at, columns = np.divmod(changed, count)
        found: Ints = np.empty((2, len(changed)), np.int32)
        found[0] = rows[at] * self.table.shape[1] + columns
        found[1] = tables.take(changed)
        self.apply(found)
        return found

    def apply(self, changes: Ints) -> None:
        """Take in what `changes` returned on rank 0."""
        self._flat[changes[0]] = changes[1]

    def read(self, rows: Ints, count: int) -> Ints:
        """Return the first `count` columns of `rows`, a copy."""
        return self.table[rows, :count]

    def forget(self) -> None:
        """Begin anew, where it is not known what has arrived."""
        self.table.fill(0)


def rows_of(slots: Ints, count: int) -> Ints:
    """Return the row of the table of each of a step's `count` sequences. slots: of `StepInputs`."""
    return slots if len(slots) else np.arange(count, dtype=np.int32)


def aligned(count: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT
