"""A linear layer's product by the compiled kernels: weights as they are, or in int8."""

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
        _check(x, self._ins, self._packed.dtype)
        rows = len(x)
        out = x.new_empty(rows, self._outs)
        offsets = None if bias is None else bias.data_ptr()
        sizes = (rows, self._outs, self._ins, self._threads)
        self._multiply(x.data_ptr(), x.stride(0), self._address, offsets, out.data_ptr(), *sizes)
        return out


class NativeInt8Linear(LinearMethod):
    """Weights in int8 with a scale per output, packed once into panels; it does not keep what it was made from.

    dtype: of the activations. A row has the same bits whatever the number of rows: those of the sums in fp32 of
    x and the whole numbers, times the scale.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, scale: Tensor, dtype: torch.dtype, threads: int) -> None:
        self._outs, self._ins = weight.shape
        self._dtype = dtype
        padded = -(-self._outs // WIDE) * WIDE
        self._packed = torch.empty(padded * self._ins, dtype=torch.int8)
        self._scales = torch.zeros(padded)
        self._scales[: self._outs] = scale
        plain = weight.contiguous()
        library.pack8(plain.data_ptr(), self._packed.data_ptr(), self._outs, self._ins)
        self._addresses = self._packed.data_ptr(), self._scales.data_ptr()
        self._multiply = library.multiply8
        self._threads = threads

    @staticmethod
    def supports(library: ctypes.CDLL, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether `library` is for this CPU, and can pack int8 `weight` for activations of `dtype`."""
        return bool(library.multiplies()) and (dtype is not torch.bfloat16 or weight.shape[1] % 2 == 0)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        _check(x, self._ins, self._dtype)
        out = x.new_empty(len(x), self._outs)
        offsets = None if bias is None else bias.data_ptr()
        sizes = (len(x), self._outs, self._ins, self._threads)
        self._multiply(x.data_ptr(), x.stride(0), *self._addresses, offsets, out.data_ptr(), *sizes)
        return out


def _check(x: Tensor, width: int, dtype: torch.dtype) -> None:
    """Raise `ValueError` for rows that C would read past the end of."""
    if x.shape[1] != width or x.dtype is not dtype or x.stride(1) != 1:
        wanted = f"[rows, {width}] of {dtype} with adjacent features"
        raise ValueError(f"x is {list(x.shape)} of {x.dtype} with strides {x.stride()}; {wanted} is multiplied here")
