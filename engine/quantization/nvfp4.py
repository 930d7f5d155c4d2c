"""NVFP4: numbers of four bits (E2M1) in groups of 16 that share an e4m3 scale, and all of them one in fp32.

    modelopt               weight [out, in / 2] uint8, weight_scale [out, in / 16] e4m3, weight_scale_2 fp32
    nvfp4-pack-quantized   weight_packed, weight_scale likewise, weight_global_scale fp32, by which is divided

Of two numbers in a byte the first is in the low half.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3
from engine.quantization.layout import Layout, Tensors, checked, read_as
from parallel.parameter import Recipe

GROUP = 16


class Nvfp4(Layout):
    """modelopt: whether tensors are those of modelopt."""

    floats: ClassVar[bool] = True
    scale_dtype: ClassVar[torch.dtype] = E4M3
    has_whole: ClassVar[bool] = True

    def __init__(self, *, modelopt: bool) -> None:
        super().__init__(GROUP)
        self._modelopt = modelopt
        self._codes = "weight" if modelopt else "weight_packed"
        self._whole = "weight_scale_2" if modelopt else "weight_global_scale"

    @override
    def codes(self, outs: int, ins: int) -> Recipe:
        return Recipe(read_as(self._codes, (outs, ins // 2), (torch.uint8,)), lambda read: read[self._codes])

    @override
    def scales(self, outs: int, ins: int) -> Recipe:
        tensors = read_as("weight_scale", (outs, ins // GROUP), (E4M3,))

        def make(read: Tensors) -> Tensor:
            checked(read["weight_scale"], "weight_scale")
            return read["weight_scale"]

        return Recipe(tensors, make)

    @override
    def whole(self, outs: int) -> Recipe:
        def make(read: Tensors) -> Tensor:
            stored = checked(read[self._whole], self._whole)
            if stored.numel() != 1 or not bool(stored > 0):
                raise ValueError(f"{self._whole} is no positive number")
            whole = stored if self._modelopt else checked(stored.reciprocal(), f"1 / {self._whole}")
            return whole.flatten().expand(outs)

        return Recipe(read_as(self._whole, None, (torch.float32,)), make)
