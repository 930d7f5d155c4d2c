"""A linear layer's product by the compiled kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from typing_extensions import override

from parallel.methods import LinearMethod

WIDE = 64  # outputs of one panel of packed weights, as in multiply.c


class NativeLinear(LinearMethod):
    """The weight packed once into panels; it does not keep the weight it was made from.

    A row has the same bits whatever the number of rows, and no row count needs a preparation of its own.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, threads: int) -> None:
        self._outs, self._ins = weight.shape
        self._packed = torch.empty(-(-self._outs // WIDE) * WIDE * self._ins, dtype=weight.dtype)
        plain = weight.contiguous()  # in a name of its own: a copy must outlive the call
        library.pack(plain.data_ptr(), self._packed.data_ptr(), self._outs, self._ins)
        self._address = self._packed.data_ptr()
        self._multiply = library.multiply
        self._threads = threads

    @staticmethod
    def supports(library: ctypes.CDLL, weight: Tensor) -> bool:
        """Whether `library` is for this CPU and dtype, and can pack `weight`; bfloat16 inputs are taken in pairs."""
        return bool(library.multiplies()) and (weight.dtype is not torch.bfloat16 or weight.shape[1] % 2 == 0)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, width = x.shape
        # C would read past the end of what has another layout.
        if width != self._ins or x.dtype is not self._packed.dtype or x.stride(1) != 1:
            wanted = f"[rows, {self._ins}] of {self._packed.dtype} with adjacent features"
            raise ValueError(
                f"x is {list(x.shape)} of {x.dtype} with strides {x.stride()}; {wanted} is multiplied here"
            )
        out = x.new_empty(rows, self._outs)
        offsets = None if bias is None else bias.data_ptr()
        sizes = (rows, self._outs, self._ins, self._threads)
        self._multiply(x.data_ptr(), x.stride(0), self._address, offsets, out.data_ptr(), *sizes)
        return out
