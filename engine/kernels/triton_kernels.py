"""The small kernels of a layer in Triton: one pass over memory each, where torch needs several.

Every row is worked on by one program, of a shape that follows from the row's width alone, so that its bits are the
same in any company. Sums are in fp32; what torch's operations round on the way is rounded here too. Imported only
where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import TorchKernels
from engine.kernels.handles import ceil_div, kept, next_power_of_2
from engine.kernels.triton_quantised import TritonInt8Linear, quantise_rows_in_one_pass
from parallel.methods import LinearMethod

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 32768  # elements of a row that a program holds in registers
GATE_BLOCK = 1024
HEADS = 8  # normed and rotated by one program


class TritonKernels(TorchKernels):
    """Norms, rotation and gating in one launch each; LayerNorm and products but with few rows in int8 are torch's.

    Torch's operations serve what these are not made for: other dtypes, rows with gaps, rows beyond `WIDEST`.
    """

    @override
    def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        return TritonInt8Linear(weight, scale)

    @override
    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_rows_in_one_pass(x)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _serves(x, weight):
            return super().rms_norm(x, weight, eps)
        return _norm(x, None, weight, eps)

    @override
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _serves(x, residual, weight):
            return super().add_rms_norm(residual, x, weight, eps)
        return _norm(x, residual, weight, eps)

    @override
    def rotation(self, angles: Tensor) -> Any:
        return angles.contiguous()

    @override
    def norm_rotate(self, heads: Tensor, norms: Tensor | None, rotation: Any, eps: float) -> Tensor:
        num_tokens, num_heads, size = heads.shape
        side_by_side = heads.stride(2) == 1 and (heads.stride(1) == size or num_heads == 1)
        if heads.dtype not in DTYPES or size % 2 or not side_by_side:
            return super().norm_rotate(heads, norms, None if rotation is None else super().rotation(rotation), eps)
        if (norms is None and rotation is None) or not heads.numel():
            return heads
        block = next_power_of_2(size // 2)
        _norm_rotate_kernel[(num_tokens, ceil_div(num_heads, HEADS))](
            heads, norms, rotation, heads.stride(0), num_heads, eps,
            HALF=size // 2, HEADS=HEADS, BLOCK=block, NORM=norms is not None, ROTATE=rotation is not None,
            num_warps=_warps(2 * HEADS * block),
        )  # fmt: skip
        return heads

    @override
    def silu_gate(self, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES or not x.is_contiguous():
            return super().silu_gate(x)
        rows, size = len(x), x.shape[1] // 2
        out = x.new_empty(rows, size)
        if out.numel():
            grid = (rows, ceil_div(size, GATE_BLOCK))
            _silu_gate_kernel[grid](x, out, size, BLOCK=GATE_BLOCK, num_warps=_warps(GATE_BLOCK))
        return out


def _serves(*tensors: Tensor) -> bool:
    fits = tensors[0].dtype in DTYPES and tensors[0].shape[-1] <= WIDEST
    return fits and all(each.dtype is tensors[0].dtype and each.is_contiguous() for each in tensors)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    rows, size = x.shape
    if out.numel():
        block = next_power_of_2(size)
        _norm_kernel[(rows,)](
            x, residual, weight, out, size, eps, ADD=residual is not None, BLOCK=block, num_warps=_warps(block)
        )
    return out


def _warps(elements: int) -> int:
    """Return the warps of a program: 8 elements of a thread fill a load of 16 bytes."""
    return max(1, min(16, elements // 256))


@kept
@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,  # changed in place
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < size
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        row = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + row.to(tl.float32)).to(row.dtype)
        tl.store(residual + at, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weights = tl.load(weight + tl.arange(0, BLOCK), mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale * weights).to(row.dtype), mask=inside)


@kept
@triton.jit
def _norm_rotate_kernel(
    heads: tl.tensor,  # [num_tokens, num_heads, 2 * HALF], changed in place
    norms: tl.tensor,  # [num_heads, 2 * HALF]
    angles: tl.tensor,  # [num_tokens, 2, HALF] fp32: cosines, sines
    token_stride: tl.tensor,
    num_heads: tl.tensor,
    eps: tl.tensor,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (pair < HALF)
    within = head * (2 * HALF) + pair
    at = heads + token * token_stride + within
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
        low = _rounded(low * scale, dtype) * tl.load(norms + within, mask=inside, other=0.0).to(tl.float32)
        high = _rounded(high * scale, dtype) * tl.load(norms + within + HALF, mask=inside, other=0.0).to(tl.float32)
        low, high = _rounded(low, dtype), _rounded(high, dtype)
    if ROTATE:
        angle = angles + token * (2 * HALF) + pair
        cos = _rounded(tl.load(angle, mask=pair < HALF, other=0.0), dtype)
        sin = _rounded(tl.load(angle + HALF, mask=pair < HALF, other=0.0), dtype)
        low, high = _rounded(low * cos, dtype) - high * sin, _rounded(high * cos, dtype) + low * sin
    tl.store(at, low.to(dtype), mask=inside)
    tl.store(at + HALF, high.to(dtype), mask=inside)


@kept
@triton.jit
def _silu_gate_kernel(x: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = _rounded(wide / (1.0 + tl.exp(-wide)), gate.dtype)
    tl.store(out + row * size + column, (gated * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return x.to(dtype).to(tl.float32)
