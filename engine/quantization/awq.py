"""AWQ (Lin et al., arXiv 2306.00978) in four bits, as AutoAWQ writes its version GEMM.

    qweight [in, out / 8] int32, eight outputs in each
    qzeros  [groups, out / 8] int32, likewise
    scales  [groups, out]

Of eight outputs the ones numbered 0 2 4 6 1 3 5 7 lie one after another, from the lowest bits on.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from engine.quantization.layout import INT32, PER_WORD, Layout, Tensors, halves, read_as, unpacked
from parallel.parameter import Recipe

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # at which each of eight outputs lies


class Awq(Layout):
    """See above."""

    outputs_in_words = True

    @override
    def codes(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("qweight", (ins, outs // PER_WORD), INT32)

        def make(read: Tensors) -> Tensor:
            return halves(_by_output(read["qweight"]).t())

        return Recipe(tensors, make)

    @override
    def zeros(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("qzeros", (ins // self.group, outs // PER_WORD), INT32)
        return Recipe(tensors, lambda read: _by_output(read["qzeros"]).t())


def _by_output(words: Tensor) -> Tensor:
    """[rows, out / 8] int32 -> [rows, out] uint8."""
    return unpacked(words, 1).unflatten(1, (-1, PER_WORD))[..., list(PLACES)].flatten(1)
