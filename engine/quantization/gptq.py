"""GPTQ (Frantar et al., arXiv 2210.17323) in four bits, as AutoGPTQ and GPTQModel write it; `eight_bits` has eight.

    qweight [in / 8, out] int32, eight inputs in each, the first in the lowest bits
    qzeros  [groups, out / 8] int32, eight outputs in each
    scales  [groups, out]
    g_idx   [in] int32, the group of each input; those of `desc_act` are in no order

In `checkpoint_format` gptq the zeros on disk are one less than they are, so that 0 is 15; in gptq_v2 as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.quantization.layout import (
    INT32,
    PER_WORD,
    Layout,
    Tensors,
    halves,
    in_order_of_groups,
    read_as,
    unpacked,
)
from parallel.parameter import Recipe

GROUPS_OF_INPUTS = (torch.int32, torch.int64)
LESS_ONE = "gptq"  # the `checkpoint_format` whose zeros are one less


def check_adjacent(g_idx: Tensor, group: int) -> None:
    """Raise `ValueError` where groups of inputs are not side by side, and config.json says nothing of it."""
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
        raise ValueError("g_idx has groups of inputs that are not adjacent, and config.json no desc_act")


class Gptq(Layout):
    """less_one: whether zeros on disk are one less."""

    outputs_in_words = True

    def __init__(self, group: int, *, reordered: bool, less_one: bool) -> None:
        super().__init__(group, reordered=reordered)
        self._less_one = less_one

    @override
    def codes(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("qweight", (ins // PER_WORD, outs), INT32)
        groups = read_as("g_idx", (ins,), GROUPS_OF_INPUTS)

        def make(read: Tensors) -> Tensor:
            codes = unpacked(read["qweight"], 0)
            if self.reordered:
                codes = codes[in_order_of_groups(read["g_idx"], self.group)]
            elif "g_idx" in read:
                check_adjacent(read["g_idx"], self.group)
            return halves(codes.t())

        return Recipe(tensors | groups, make) if self.reordered else Recipe(tensors, make, groups)

    @override
    def zeros(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("qzeros", (ins // self.group, outs // PER_WORD), INT32)

        def make(read: Tensors) -> Tensor:
            zeros = unpacked(read["qzeros"], 1).t()
            return (zeros + 1) & 0xF if self._less_one else zeros

        return Recipe(tensors, make)

    @override
    def order(self, ins: int) -> Recipe:
        tensors = read_as("g_idx", (ins,), GROUPS_OF_INPUTS)
        return Recipe(tensors, lambda read: in_order_of_groups(read["g_idx"], self.group)[None])
