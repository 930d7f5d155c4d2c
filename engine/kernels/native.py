"""The kernels of a model compiled for this CPU: a single pass over memory each, and few launches per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.attend import attention_proof, declare
from engine.kernels.base import FourBits, TorchKernels
from engine.kernels.compiler import load_library
from engine.kernels.native_linear import NativeBlockLinear, NativeFourBitLinear, NativeInt8Linear, NativeLinear
from engine.kernels.recurrent import StateRows
from parallel.linear import LinearMethod

SOURCES = ("attention.c", "elementwise.c", "recurrent.c")

LANES = 16  # elements of a vector: what sizes must be multiples of
MOST_TAPS = 8  # of a short convolution, as in recurrent.c
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


NAMES = (
    *("rms_norm", "norm_rotate", "silu_gate", "gelu_gate"),
    *("short_conv", "unit_heads", "outer_product_state"),
)


def native_library(
    head_dim: int, dtype: torch.dtype, block_size: int = LANES, latent: int = 0, matrix_unit: bool = True
) -> ctypes.CDLL | None:
    """Return the library for these sizes, or None where it cannot be compiled.

    block_size: a multiple of 16. latent: as of `AttentionSpec`, a multiple of 16. matrix_unit: whether the
    CPU's may be used, if it has one; Linux must allow it (`may_attend`).
    """
    macros = {"HEAD_DIM": head_dim, "BLOCK": block_size, "BF16": int(dtype is torch.bfloat16), "LATENT": latent}
    macros["AMX"] = int(matrix_unit)
    library = load_library(SOURCES, macros, attention_proof(head_dim, dtype, block_size, latent))
    if library is not None:
        declare(library)
        library.rms_norm.argtypes = (c_void_p,) * 4 + (c_int64, c_int64, c_float, c_int64)
        library.norm_rotate.argtypes = (c_void_p,) * 3 + (c_int64,) * 3 + (c_float, c_int64)
        library.silu_gate.argtypes = library.gelu_gate.argtypes = (c_void_p,) * 2 + (c_int64,) * 3
        library.short_conv.argtypes = (c_void_p, c_int64, *(c_void_p,) * 7, *(c_int64,) * 5)
        library.unit_heads.argtypes = (c_void_p, c_int64, c_void_p, *(c_int64,) * 3, c_float, c_float, c_int64)
        library.outer_product_state.argtypes = (*(c_void_p,) * 3, c_int64, *(c_void_p,) * 7, *(c_int64,) * 7)
        for name in NAMES:
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

    def __init__(self, library: ctypes.CDLL, products: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self._library = library
        self._products = products
        self._dtype = dtype
        self._threads = threads

    @override
    def linear(self, weight: Tensor) -> LinearMethod | None:
        fits = weight.dtype is self._dtype and NativeLinear.supports(self._products, weight)
        return NativeLinear(self._products, weight, self._threads) if fits else None

    @override
    def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        if not NativeInt8Linear.supports(self._products, weight):
            return None
        return NativeInt8Linear(self._products, weight, scale, self._dtype, self._threads)

    @override
    def block_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        if not NativeBlockLinear.supports(weight, scale):
            return None
        return NativeBlockLinear(self._products, weight, scale, self._dtype, self._threads)

    @override
    def four_bit_linear(self, weight: FourBits) -> LinearMethod | None:
        if not NativeFourBitLinear.supports(self._products, weight):
            return None
        return NativeFourBitLinear(self._products, weight, self._dtype, self._threads)

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
        return self._gate(self._library.silu_gate, x) if self._serves(x.shape[1] // 2, x) else super().silu_gate(x)

    @override
    def gelu_gate(self, x: Tensor) -> Tensor:
        return self._gate(self._library.gelu_gate, x) if self._serves(x.shape[1] // 2, x) else super().gelu_gate(x)

    def _gate(self, function: Callable[..., None], x: Tensor) -> Tensor:
        rows, size = len(x), x.shape[1] // 2
        out = x.new_empty(rows, size)
        function(x.data_ptr(), out.data_ptr(), rows, size, self._threads)
        return out

    @override
    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool
    ) -> Tensor:
        taps, size = weight.shape
        if size % LANES or taps > MOST_TAPS or not self._lies_well(x, size):
            return super().short_conv(x, weight, bias, state, rows, silu)
        out = x.new_empty(x.shape)
        offsets = None if bias is None else bias.data_ptr()
        pointers = (state.data_ptr(), *_addresses(rows), out.data_ptr())
        sizes = (len(rows.sources), size, taps, int(silu), self._threads)
        self._library.short_conv(x.data_ptr(), x.stride(0), weight.data_ptr(), offsets, *pointers, *sizes)
        return out

    @override
    def unit_heads(self, x: Tensor, eps: float, scale: float) -> Tensor:
        if x.shape[2] % LANES or not self._lies_well(x, *x.shape[1:]):
            return super().unit_heads(x, eps, scale)
        out = x.new_empty(x.shape, dtype=torch.float32)
        self._library.unit_heads(x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape, eps, scale, self._threads)
        return out

    @override
    def outer_product_state(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        gain: Tensor,
        state: Tensor,
        rows: StateRows,
        delta: bool,
    ) -> Tensor:
        _, heads, width = value.shape
        wide = all(each.dtype is torch.float32 and each.is_contiguous() for each in (query, key, decay, gain, state))
        if width % LANES or not wide or not self._lies_well(value, heads, width):
            return super().outer_product_state(query, key, value, decay, gain, state, rows, delta)
        out = value.new_empty(value.shape)
        inputs = (query.data_ptr(), key.data_ptr(), value.data_ptr(), value.stride(0))
        pointers = (decay.data_ptr(), gain.data_ptr(), state.data_ptr(), *_addresses(rows), out.data_ptr())
        _, groups, depth = query.shape
        sizes = (len(rows.sources), groups, heads, depth, width, int(delta), self._threads)
        self._library.outer_product_state(*inputs, *pointers, *sizes)
        return out

    def _lies_well(self, x: Tensor, *sizes: int) -> bool:
        """Whether a token's numbers lie side by side in the model's dtype; x: [num_tokens, *sizes]."""
        dense = torch.empty(sizes, device="meta").stride()
        return x.dtype is self._dtype and x.shape[1:] == sizes and x.stride()[1:] == dense


def _addresses(rows: StateRows) -> tuple[int, int, int]:
    for each in (rows.starts, rows.sources, rows.targets):
        if each.dtype is not torch.int32 or not each.is_contiguous():
            raise ValueError(f"rows are {each.dtype} with strides {each.stride()}; contiguous int32 is read here")
    return rows.starts.data_ptr(), rows.sources.data_ptr(), rows.targets.data_ptr()
