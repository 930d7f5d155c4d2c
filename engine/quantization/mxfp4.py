"""MXFP4: numbers of four bits (E2M1) in groups of 32 that share a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0. Exponents are uint8, counted from -127; 255 is no number. Of
two numbers in a byte the first is in the low half.

    gpt-oss, all experts in one tensor  blocks [out, groups, 16] uint8, scales [out, groups], of each expert
    mxfp4-pack-quantized                weight_packed [out, in / 2] uint8, weight_scale [out, groups]
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from engine.quantization.layout import Layout, Tensors, checked, read_as
from parallel.parameter import Recipe

GROUP = 32
BYTES = (torch.uint8,)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


class Mxfp4(Layout):
    """in_blocks: whether tensors are those of gpt-oss."""

    floats: ClassVar[bool] = True
    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def __init__(self, *, in_blocks: bool) -> None:
        super().__init__(GROUP)
        self._codes, self._scale = ("blocks", "scales") if in_blocks else ("weight_packed", "weight_scale")
        self._in_blocks = in_blocks

    @override
    def codes(self, outs: int, ins: int) -> Recipe:
        shape = (outs, ins // GROUP, GROUP // 2) if self._in_blocks else (outs, ins // 2)
        return Recipe(read_as(self._codes, shape, BYTES), lambda read: read[self._codes].flatten(1))

    @override
    def scales(self, outs: int, ins: int) -> Recipe:
        def make(read: Tensors) -> Tensor:
            exponents = read[self._scale].contiguous()
            checked(exponents.view(torch.float8_e8m0fnu), self._scale)
            return exponents.view(torch.uint8)

        return Recipe(read_as(self._scale, (outs, ins // GROUP), EXPONENTS), make)
