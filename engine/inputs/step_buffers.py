"""The inputs of a step on the device, in one copy.

`to_device` makes them anew for each step: for a CPU, where a step is run while it is launched. `StepBuffers` fills
memory that stays where it is, as CUDA graphs need it, and sends of the block table only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepTensors
from engine.device.gpu import HostCopies, HostPair
from engine.inputs.block_table import RankTable, aligned, rows_of
from engine.report import NO_PAIRS, Ints, StepInputs

NOWHERE: Ints = np.zeros(0, np.int32)
NO_STEP = StepInputs(NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NO_PAIRS, NOWHERE, NO_PAIRS)


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


def to_device(inputs: StepInputs, device: torch.device) -> tuple[StepTensors, Tensor]:
    """Return the step on the device, and its block copies, [num_copies, 2].

    The tensors share one buffer that is this step's own, so the arrays of `inputs` may be reused or read-only.
    """
    arrays = (
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.logits_indices,
        inputs.copy_blocks,
    )
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    flat = packed.split([array.size for array in arrays])
    ids, positions, slots, starts, lens, tables, logits, copies = flat
    tables = tables.view(inputs.block_tables.shape)
    return StepTensors(inputs, ids, positions, slots.long(), starts, lens, tables, logits), copies.view(-1, 2)


class StepBuffers:
    """Fills the device's inputs, one step after another; each overwrites the one before, on the device as well.

    All arrays of a step go in one copy. The block table stays on the device, a row for each slot of the engine's
    tables, and only entries that changed are sent. Its last row is all zeros: the blocks of padding.

    What a step gets lives as long as the next step is not filled in. For one thread, and one stream.
    """

    def __init__(
        self, tokens: int, known: RankTable, device: torch.device, copies: HostCopies, mixed: MixedShape = NOT_MIXED
    ) -> None:
        """tokens: most of one step. mixed: the largest shape that steps are padded to.

        table: the block table on the device, a row for each of `known` and one of padding.
        known: what this rank knows of the block table; no step has more rows, padding of a decode step included.
        """
        rows, width = known.table.shape
        exact = 4 * aligned(tokens) + 4 * aligned(rows + 1)
        changes = 4 * aligned(tokens + rows)  # room for block copies and what is new in the block table
        most = max(exact, sum(map(aligned, mixed.arrays))) + changes
        self.device = device
        self._copies = copies
        self._pair = HostPair(copies, most)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=device)
        self._known = known
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.table[:-1] = torch.from_numpy(known.table)
        self._counting = torch.arange(rows + 1, dtype=torch.int32, device=device)

    @property
    def padding_row(self) -> int:
        """The row of the block table that padding reads."""
        return len(self.table) - 1

    def load(self, inputs: StepInputs) -> tuple[StepTensors, Tensor]:
        """Fill in a step; return it on the device, and its block copies, [num_copies, 2]."""
        arrays = (
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_start_loc,
            inputs.seq_lens,
            _rows(inputs),
            inputs.logits_indices,
        )
        (ids, positions, slots, starts, lens, rows, logits), copies = self._fill(arrays, inputs)
        tables = self.table.index_select(0, rows)
        return StepTensors(inputs, ids, positions, slots.long(), starts, lens, tables, logits), copies

    def load_decode(self, inputs: StepInputs, size: int) -> tuple[Tensor, Tensor]:
        """Fill in a step of one token a sequence, with padding up to `size` of them; return its ids and block copies.

        Padding is token 0 at position 0, written to the null block, of a sequence of no length.
        """
        tables = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens, _rows(inputs))
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
        tables = self.table.index_select(0, rows)
        return StepTensors(NO_STEP, ids, positions, slots.long(), counting[: size + 1], lens, tables, counting[:size])

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
            (_rows(inputs), self.padding_row),
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
        tables = self.table.index_select(0, rows)
        return StepTensors(NO_STEP, ids, positions, slots.long(), starts, lens, tables, logits), plan

    def _fill(self, arrays: Sequence[Ints], inputs: StepInputs) -> tuple[list[Tensor], Tensor]:
        """Send `arrays`, the block copies and what is new in the block table, which is taken in."""
        try:
            changes = inputs.table_changes
            if changes is None:
                changes = self._known.changes_of(inputs)
            sent, (copies, places, values) = self._send(arrays, (inputs.copy_blocks.ravel(), *changes))
            if len(places):
                self.table.view(-1).index_copy_(0, places.long(), values)
        except BaseException:
            self._forget()
            raise
        return sent, copies.view(-1, 2)

    def _forget(self) -> None:
        """Begin anew: what has arrived is not known.

        In a group rank 0 goes on sending changes alone: only because any error ends the group does this do no harm.
        """
        self._known.forget()
        self.table.zero_()

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


def _rows(inputs: StepInputs) -> Ints:
    return rows_of(inputs.slots, inputs.num_reqs)


def _padded(array: Ints, size: int, fill: int) -> Ints:
    padded: Ints = np.full(size, fill, np.int32)
    padded[: len(array)] = array
    return padded
