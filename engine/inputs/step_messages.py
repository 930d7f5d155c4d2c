"""What the driver tells the other ranks of a step: its arrays, and what is new in the block table."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.inputs.table_mirror import TableMirror
from engine.report import Ints, StepInputs
from parallel.errors import ChannelError
from parallel.packing import Buffer, Message, pack

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
