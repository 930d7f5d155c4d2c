"""The kernels compiled for this CPU: a single pass over memory each, and few launches per layer."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import TorchKernels
from engine.kernels.compiler import load_library
from engine.kernels.linear import NativeInt8Linear, NativeLinear
from parallel.methods import LinearMethod

LANES = 16  # elements of a vector: what sizes must be multiples of
DTYPES = (torch.float32, torch.bfloat16)


def why_not_native(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the compiled kernels cannot serve a model, None when they can, a compiler permitting."""
    if device.type != "cpu":
        return f"they are for CPUs, not for {device.type}"
    if dtype not in DTYPES:
        return f"they compute in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % LANES:
        return f"head size {head_dim} is not a multiple of {LANES}"
    return None


def native_library(head_dim: int, dtype: torch.dtype, block_size: int = LANES) -> ctypes.CDLL | None:
    """Return the library for these sizes, or None where it cannot be compiled. block_size: a multiple of 16."""
    macros = {"HEAD_DIM": head_dim, "BLOCK": block_size, "BF16": int(dtype is torch.bfloat16)}
    library = load_library(macros)
    if library is not None:
        library.rms_norm.argtypes = (c_void_p,) * 4 + (c_int64, c_int64, c_float, c_int64)
        library.norm_rotate.argtypes = (c_void_p,) * 3 + (c_int64,) * 3 + (c_float, c_int64)
        library.silu_gate.argtypes = (c_void_p,) * 2 + (c_int64,) * 3
        library.attend.argtypes = (
            *(c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_int),
        )
        library.pack.argtypes = (c_void_p,) * 2 + (c_int64,) * 2
        library.multiply.argtypes = (c_void_p, c_int64, *(c_void_p,) * 3, *(c_int64,) * 4)
        library.pack8.argtypes = (c_void_p,) * 2 + (c_int64,) * 2
        library.multiply8.argtypes = (c_void_p, c_int64, *(c_void_p,) * 4, *(c_int64,) * 4)
        for name in ("rms_norm", "norm_rotate", "silu_gate", "attend", "pack", "multiply", "pack8", "multiply8"):
            getattr(library, name).restype = None
    return library


def heads_address(heads: Tensor, dtype: torch.dtype) -> int:
    """Return where `heads`, [num_tokens, num_heads, head_dim], begins; tokens may be strided.

    Raises `ValueError` for another dtype or a token with gaps, which C would read past the end of.
    """
    _, num_heads, size = heads.shape
    _, apart, step = heads.stride()
    if heads.dtype is not dtype or step != 1 or (apart != size and num_heads > 1):
        raise ValueError(f"heads are {heads.dtype} with strides {heads.stride()}; {dtype} side by side is read here")
    return heads.data_ptr()


class NativeKernels(TorchKernels):
    """Calls into the library by address; torch's operations serve what it is not made for.

    That is sizes that are no multiple of 16, other dtypes and tensors with gaps.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self._library = library
        self._dtype = dtype
        self._threads = threads

    @override
    def linear(self, weight: Tensor) -> LinearMethod | None:
        fits = weight.dtype is self._dtype and NativeLinear.supports(self._library, weight)
        return NativeLinear(self._library, weight, self._threads) if fits else None

    @override
    def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        if not NativeInt8Linear.supports(self._library, weight, self._dtype):
            return None
        return NativeInt8Linear(self._library, weight, scale, self._dtype, self._threads)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._serves(x.shape[1], x, weight):
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    @override
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._serves(x.shape[1], residual, x, weight):
            return super().add_rms_norm(residual, x, weight, eps)
        return self._norm(x, residual.data_ptr(), weight, eps)

    def _serves(self, size: int, *tensors: Tensor) -> bool:
        return not size % LANES and all(each.dtype is self._dtype and each.is_contiguous() for each in tensors)

    def _norm(self, x: Tensor, residual: int | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        pointers = (x.data_ptr(), residual, weight.data_ptr(), out.data_ptr())
        self._library.rms_norm(*pointers, *x.shape, eps, self._threads)
        return out

    @override
    def rotation(self, angles: Tensor) -> Any:
        return angles

    @override
    def norm_rotate(self, heads: Tensor, norms: Tensor | None, rotation: Any, eps: float) -> Tensor:
        pointers = (None if each is None else each.data_ptr() for each in (norms, rotation))
        num_tokens, num_heads, _ = heads.shape
        self._library.norm_rotate(
            heads_address(heads, self._dtype), *pointers, num_tokens, num_heads, heads.stride(0), eps, self._threads
        )
        return heads

    @override
    def silu_gate(self, x: Tensor) -> Tensor:
        rows, size = len(x), x.shape[1] // 2
        if not self._serves(size, x):
            return super().silu_gate(x)
        out = x.new_empty(rows, size)
        self._library.silu_gate(x.data_ptr(), out.data_ptr(), rows, size, self._threads)
        return out
