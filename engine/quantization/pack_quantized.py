"""compressed-tensors' pack-quantized in four bits.

weight_packed     [out, in / 8] int32, eight inputs in each, the first in the lowest bits, counted from -8
weight_scale      [out, groups]
weight_zero_point [out / 8, groups] int32, eight outputs in each, counted from -8; where weights are asymmetric
weight_shape      [2], out and in
weight_g_idx      [in] int32, the group of each input; where `actorder` is group
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.quantization.layout import (
    INT32,
    PER_WORD,
    SCALES,
    Layout,
    Tensors,
    checked,
    halves,
    in_order_of_groups,
    read_as,
    unpacked,
)
from parallel.parameter import Recipe

WHOLE = (torch.int32, torch.int64)


class PackQuantized(Layout):
    """asymmetric: whether there are zero points."""

    def __init__(self, group: int, *, reordered: bool, asymmetric: bool) -> None:
        super().__init__(group, reordered=reordered)
        self._asymmetric = asymmetric

    @override
    def codes(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("weight_packed", (outs, ins // PER_WORD), INT32)
        groups = read_as("weight_g_idx", (ins,), WHOLE)

        def make(read: Tensors) -> Tensor:
            if "weight_shape" in read and read["weight_shape"].tolist() != [outs, ins]:
                raise ValueError(f"weight_shape says {read['weight_shape'].tolist()}, config.json [{outs}, {ins}]")
            if not self.reordered:
                # Of each two bytes' halves the first is in the lower one already.
                return read["weight_packed"].contiguous().view(torch.uint8)
            order = in_order_of_groups(read["weight_g_idx"], self.group)
            return halves(unpacked(read["weight_packed"], 1)[:, order])

        return Recipe(tensors | (groups if self.reordered else {}), make, read_as("weight_shape", (2,), WHOLE))

    @override
    def scales(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("weight_scale", (outs, ins // self.group), SCALES)
        return Recipe(tensors, lambda read: checked(read["weight_scale"], "weight_scale"))

    @override
    def zeros(self, outs: int, ins: int) -> Recipe:
        if not self._asymmetric:
            return super().zeros(outs, ins)
        tensors = read_as("weight_zero_point", (-(-outs // PER_WORD), ins // self.group), INT32)
        return Recipe(tensors, lambda read: unpacked(read["weight_zero_point"], 0)[:outs])

    @override
    def order(self, ins: int) -> Recipe:
        tensors = read_as("weight_g_idx", (ins,), WHOLE)
        return Recipe(tensors, lambda read: in_order_of_groups(read["weight_g_idx"], self.group)[None])
