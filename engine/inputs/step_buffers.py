"""The inputs of steps on the device: memory that stays where it is, filled by one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepLayout, StepTensors
from engine.device.gpu import HostCopies, HostPair
from engine.inputs.step_messages import TableMirror
from engine.report import Ints, StepInputs

# Each array begins at a multiple of so many int32, as kernels are compiled for: 64 bytes.
ALIGNMENT = 16
NOWHERE: Ints = np.zeros(0, np.int32)
NO_LAYOUT = StepLayout(NOWHERE, NOWHERE, NOWHERE, NOWHERE, np.zeros((0, 0), np.int32))


@dataclass(frozen=True, slots=True)
class MixedShape:
    """What a mixed step is padded to: tokens, rows that they belong to, and int32 of the attention backend's plan.

    Behind those rows there is another, of padding, which has neither a token nor a length.
    """

    tokens: int
    rows: int
    plan: int

    @property
    def arrays(self) -> tuple[int, ...]:
        """Lengths of its arrays: ids, positions, slots, starts, lengths, table rows, wanted logits, plan."""
        tokens, rows = self.tokens, self.rows
        return (tokens, tokens, tokens, rows + 2, rows + 1, rows + 1, rows, self.plan)


NOT_MIXED = MixedShape(0, 0, 0)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """What the steps of an engine hold at most: tokens, rows (sequences) and columns of the block table.

    A decode step has at most so many rows with its padding, too. mixed: the largest shape that steps are padded to.
    """

    tokens: int
    rows: int
    columns: int
    mixed: MixedShape = NOT_MIXED

    @property
    def most(self) -> int:
        """int32 that the arrays of a step take."""
        exact = 4 * aligned(self.tokens) + 4 * aligned(self.rows + 1)
        return max(exact, sum(map(aligned, self.mixed.arrays)))

    @property
    def room(self) -> int:
        """int32 that block copies and changes of the block table may take in the same copy."""
        return 4 * aligned(self.tokens + self.rows)


class StepBuffers:
    """Fills the device's inputs, one step after another; each overwrites the one before, on the device as well.

    All arrays of a step go in one copy. The block table stays on the device, a row for each slot of the engine's
    tables, and only entries that changed are sent. Its last row is all zeros: the blocks of padding.

    What a step gets lives as long as the next step is not filled in. For one thread, and one stream.
    """

    def __init__(self, sizes: BufferSizes, device: torch.device, copies: HostCopies) -> None:
        width = aligned(sizes.columns)
        self.device = device
        self._copies = copies
        self._pair = HostPair(copies, sizes.most + sizes.room)
        self._inputs = torch.zeros(sizes.most + sizes.room, dtype=torch.int32, device=device)
        self._mirror = TableMirror(sizes.rows, width)
        self._table = torch.zeros(sizes.rows + 1, width, dtype=torch.int32, device=device)
        self._counting = torch.arange(sizes.rows + 1, dtype=torch.int32, device=device)
        self._rows: Ints = np.arange(sizes.rows, dtype=np.int32)

    @property
    def padding_row(self) -> int:
        """The row of the block table that padding reads."""
        return len(self._table) - 1

    def load(self, inputs: StepInputs) -> tuple[StepTensors, Tensor]:
        """Fill in a step; return it on the device, and its block copies, [num_copies, 2]."""
        arrays = (
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_start_loc,
            inputs.seq_lens,
            self._rows_of(inputs),
            inputs.logits_indices,
        )
        (ids, positions, slots, starts, lens, rows, logits), copies = self._fill(arrays, inputs)
        layout = StepLayout(
            inputs.slot_mapping,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.num_computed_tokens,
            inputs.block_tables,
        )
        tables = self._table.index_select(0, rows)
        return StepTensors(layout, ids, positions, slots.long(), starts, lens, tables, logits), copies

    def load_decode(self, inputs: StepInputs, size: int) -> tuple[Tensor, Tensor]:
        """Fill in a step of one token a sequence, with padding up to `size` of them; return its ids and block copies.

        Padding is token 0 at position 0, written to the null block, of a sequence of no length.
        """
        tables = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, self._rows_of(inputs))
        padding = (0, 0, 0, 0, self.padding_row)
        arrays = [_padded(array, size, fill) for array, fill in zip(tables, padding, strict=True)]
        (ids, *_), copies = self._fill(arrays, inputs)
        return ids[: inputs.num_tokens], copies

    def blank(self, size: int) -> None:
        """Fill in a decode step of nothing but padding."""
        zeros: Ints = np.zeros(size, np.int32)
        self._send((zeros, zeros, zeros, zeros, np.full(size, self.padding_row, np.int32)))

    def decode_tensors(self, size: int) -> StepTensors:
        """Return the decode step of `size` sequences that is filled in, from memory that is the same every time.

        Its slots and block tables are computed here: a graph must hold this call as well. Its layout is empty.
        """
        ids, positions, slots, lens, rows = (
            self._inputs[start : start + size] for start in range(0, 5 * aligned(size), aligned(size))
        )
        counting = self._counting
        tables = self._table.index_select(0, rows)
        return StepTensors(
            NO_LAYOUT, ids, positions, slots.long(), counting[: size + 1], lens, tables, counting[:size]
        )

    def load_mixed(self, inputs: StepInputs, shape: MixedShape, plan: Ints) -> tuple[Tensor, Tensor]:
        """Fill in a step with padding up to a shape; return its ids and its block copies.

        Padding is token 0 at position 0, written to the null block, of no row; rows of no token and no length; and
        logits of the first token.
        """
        tables: tuple[tuple[Ints, int], ...] = (
            (inputs.input_ids, 0),
            (inputs.positions, 0),
            (inputs.slot_mapping, 0),
            (inputs.query_start_loc, inputs.num_tokens),
            (inputs.seq_lens, 0),
            (self._rows_of(inputs), self.padding_row),
            (inputs.logits_indices, 0),
            (plan, 0),
        )
        arrays = [_padded(array, size, fill) for (array, fill), size in zip(tables, shape.arrays, strict=True)]
        (ids, *_), copies = self._fill(arrays, inputs)
        return ids[: inputs.num_tokens], copies

    def blank_mixed(self, shape: MixedShape) -> None:
        """Fill in a mixed step of nothing but padding."""
        arrays: list[Ints] = [np.zeros(size, np.int32) for size in shape.arrays]
        arrays[5][:] = self.padding_row
        self._send(arrays)

    def mixed_tensors(self, shape: MixedShape) -> tuple[StepTensors, Tensor]:
        """Return the mixed step that is filled in, and its plan, from memory that is the same every time.

        Its slots and block tables are computed here: a graph must hold this call as well. Its layout is empty.
        """
        ends = np.cumsum([aligned(size) for size in shape.arrays]).tolist()
        ids, positions, slots, starts, lens, rows, logits, plan = (
            self._inputs[end - aligned(size) : end - aligned(size) + size]
            for end, size in zip(ends, shape.arrays, strict=True)
        )
        tables = self._table.index_select(0, rows)
        return StepTensors(NO_LAYOUT, ids, positions, slots.long(), starts, lens, tables, logits), plan

    def block_table(self) -> Ints:
        """Return the device's block table, [rows, columns]: for tests and for those who look for a fault."""
        table: Ints = self._table[:-1].cpu().numpy()
        return table

    def _rows_of(self, inputs: StepInputs) -> Ints:
        return inputs.slots if len(inputs.slots) else self._rows[: inputs.num_reqs]

    def _fill(self, arrays: Sequence[Ints], inputs: StepInputs) -> tuple[list[Tensor], Tensor]:
        """Send `arrays`, the block copies and what is new in the block table, which is taken in."""
        try:
            changes = self._mirror.changes(self._rows_of(inputs), inputs.block_tables)
            sent, (copies, places, values) = self._send(arrays, (inputs.copy_blocks.ravel(), *changes))
            if len(places):
                self._table.view(-1).index_copy_(0, places.long(), values)
        except BaseException:
            self._forget()
            raise
        return sent, copies.view(-1, 2)

    def _forget(self) -> None:
        """Begin anew: nobody knows what has arrived."""
        self._mirror.table.fill(0)
        self._table.zero_()

    def _send(self, arrays: Sequence[Ints], more: Sequence[Ints] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Copy all in one go, `arrays` to the head of the buffer; return both on the device."""
        ends = np.cumsum([aligned(len(array)) for array in (*arrays, *more)]).tolist()
        if ends[-1] > len(self._inputs):
            # Many long prompts found in the prefix cache at once.
            return self._send(arrays)[0], [self._send_apart(array) for array in more]
        host = self._pair.next().numpy()
        spans = [(end - aligned(len(array)), array) for end, array in zip(ends, (*arrays, *more), strict=True)]
        for start, array in spans:
            host[start : start + len(array)] = array
        self._pair.send(self._inputs[: ends[-1]])
        sent = [self._inputs[start : start + len(array)] for start, array in spans]
        return sent[: len(arrays)], sent[len(arrays) :]

    def _send_apart(self, array: Ints) -> Tensor:
        """Copy one array by itself, and wait until that is done."""
        host = self._copies.pinned(len(array))
        host.numpy()[:] = array
        target = self._inputs.new_empty(len(array))
        self._copies.send(host, target).synchronize()
        return target


def aligned(count: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _padded(array: Ints, size: int, fill: int) -> Ints:
    padded: Ints = np.full(size, fill, np.int32)
    padded[: len(array)] = array
    return padded
