"""What the driver sends the other ranks of a step: its arrays, and the entries of the block table that changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.inputs.block_table import RankTable, rows_of
from engine.report import StepInputs
from parallel.channel import Buffer, ChannelMessage, pack
from parallel.errors import ChannelError

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
    "state_sources",
    "state_copies",
    "table_changes",
)
WIDTH = "table_width"  # [1] columns of the step's block tables
FIELDS = (*PLAIN, WIDTH)


class StepWriter:
    """The driver's end: every message goes to all readers, in order."""

    def __init__(self, table: RankTable) -> None:
        """table: of the driver's own rank."""
        self._table = table

    def pack(self, inputs: StepInputs, number: int) -> Buffer:
        """Return the step as one message for the channel; notes in `inputs` what is new in the block table."""
        inputs.table_changes = self._table.changes_of(inputs)
        arrays = {name: getattr(inputs, name) for name in PLAIN}
        arrays[WIDTH] = np.array(inputs.block_tables.shape[1:], np.int32)
        return pack(ChannelMessage(STEP, number, arrays))


class StepReader:
    """A worker's end."""

    def __init__(self, table: RankTable) -> None:
        """table: of the worker's rank."""
        self._table = table

    def read(self, message: ChannelMessage) -> StepInputs:
        """Return the step in a message; most of its arrays are views. Raises `ChannelError` when it is no step."""
        arrays: dict[str, Any] = dict(message.arrays)
        if message.kind != STEP or tuple(arrays) != FIELDS:
            raise ChannelError(f"message {message.number} of kind {message.kind} is no step")
        self._table.apply(arrays["table_changes"])
        rows = rows_of(arrays["slots"], len(arrays["seq_lens"]))
        return StepInputs(block_tables=self._table.read(rows, int(arrays.pop(WIDTH)[0])), **arrays)
