"""What the driver tells the other ranks of a step: its arrays, and the entries of the block table that changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.report import Ints, StepInputs
from parallel.channel import Buffer, Message, pack
from parallel.errors import ChannelError


class TableMirror:
    """A block table that lives across steps, [rows, width] int32, zero at first; the same on both sides of a way.

    The sender asks for `changes`, the other side takes them in with `apply`; both then hold the same. What is sent
    is found by comparing, so that no step needs to know of the one before: one that was prepared and never run, or
    prepared twice, does no harm.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.table: Ints = np.zeros((rows, width), np.int32)
        self._flat: Ints = self.table.reshape(-1)  # a view

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
        """Take in what `changes` returned on the other side."""
        self._flat[changes[0]] = changes[1]

    def read(self, rows: Ints, count: int) -> Ints:
        """Return the first `count` columns of `rows`, a copy."""
        return self.table[:, :count].take(rows, axis=0)


STEP = 1  # kind of message: run one step
PLAIN = (
    "input_ids",
    "positions",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
    "num_computed_tokens",
    "logits_indices",
    "copy_blocks",
    "draws",
    "carried",
    "slots",
)
CHANGES = "table_changes"  # [2, num_changes], see `TableMirror`
WIDTH = "table_width"  # [1] columns of the step's block tables
FIELDS = (*PLAIN, CHANGES, WIDTH)


class StepWriter:
    """The driver's end: every message goes to all readers, in order."""

    def __init__(self, config: EngineConfig) -> None:
        """config: resolved, the same on all ranks."""
        self._table = _mirror(config)

    def pack(self, inputs: StepInputs, number: int) -> Buffer:
        """Return the step as one message for the channel."""
        arrays = {name: getattr(inputs, name) for name in PLAIN}
        arrays[CHANGES] = self._table.changes(_rows(inputs.slots, inputs.num_reqs), inputs.block_tables)
        arrays[WIDTH] = np.array(inputs.block_tables.shape[1:], np.int32)
        return pack(Message(STEP, number, arrays))


class StepReader:
    """A worker's end."""

    def __init__(self, config: EngineConfig) -> None:
        self._table = _mirror(config)

    def read(self, message: Message) -> StepInputs:
        """Return the step in a message; most of its arrays are views. Raises `ChannelError` when it is no step."""
        arrays: dict[str, Any] = dict(message.arrays)
        if message.kind != STEP or tuple(arrays) != FIELDS:
            raise ChannelError(f"message {message.number} of kind {message.kind} is no step")
        self._table.apply(arrays.pop(CHANGES))
        rows = _rows(arrays["slots"], len(arrays["seq_lens"]))
        tables = self._table.read(rows, int(arrays.pop(WIDTH)[0]))
        return StepInputs(**arrays, block_tables=tables)


def _mirror(config: EngineConfig) -> TableMirror:
    return TableMirror(config.max_num_seqs, config.max_blocks_per_seq)


def _rows(slots: Ints, count: int) -> Ints:
    return slots if len(slots) else np.arange(count, dtype=np.int32)
