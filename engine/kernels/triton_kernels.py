"""The small kernels of a layer in Triton: one pass over memory each, where torch needs several.

Norms, rotation, gating, and the store of a step's keys and values into the paged cache, converted to fp8 on the way
where that is so. Every row is worked on by one program, of a shape that follows from the row's width alone, so that
its bits are the same in any company. Sums are in fp32; what torch's operations round on the way is rounded here too.
Imported only where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels import triton_recurrent
from engine.kernels.base import FourBits, GroupedProduct, TorchKernels
from engine.kernels.recurrent import StateRows
from engine.kernels.triton_coded import TritonBlockLinear, TritonFourBitLinear
from engine.kernels.triton_experts import TritonGroupedProduct
from engine.kernels.triton_launch import ceil_div, kept, next_power_of_2
from engine.kernels.triton_linear import TritonInt8Linear, quantise_rows_in_one_pass
from parallel.linear import LinearMethod, ParallelLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 32768  # elements of a row that a program holds in registers
GATE_BLOCK = 1024
HEADS = 8  # normed and rotated by one program


class TritonKernels(TorchKernels):
    """Norms, rotation, gating and recurrent states in one launch each.

    LayerNorm and products are torch's, but for those of experts and those of few rows with quantised weights.

    Torch's operations serve what these are not made for: other dtypes, rows with gaps, rows beyond `WIDEST`.
    """

    @override
    def int8_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        return TritonInt8Linear(weight, scale)

    @override
    def four_bit_linear(self, weight: FourBits) -> LinearMethod | None:
        return TritonFourBitLinear(weight) if TritonFourBitLinear.supports(weight) else None

    @override
    def block_linear(self, weight: Tensor, scale: Tensor) -> LinearMethod | None:
        return TritonBlockLinear(weight, scale) if TritonBlockLinear.supports(weight) else None

    @override
    def grouped_product(self, layers: Sequence[ParallelLinear]) -> GroupedProduct | None:
        return TritonGroupedProduct(layers)

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

    @override
    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool
    ) -> Tensor:
        return triton_recurrent.short_conv(x, weight, bias, state, rows, silu)

    @override
    def unit_heads(self, x: Tensor, eps: float, scale: float) -> Tensor:
        return triton_recurrent.unit_heads(x, eps, scale)

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
        return triton_recurrent.outer_product_state(query, key, value, decay, gain, state, rows, delta)


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


FP8_MAX: tl.constexpr = tl.constexpr(448.0)  # of float8_e4m3fn


@kept
@triton.jit(do_not_specialize_on_alignment=["scales", "slots"])
def store(
    key,  # [num_tokens, kv_heads, HEAD_DIM], tokens strided; as value
    value,
    keys,  # [num_blocks, PAGE, kv_heads, HEAD_DIM], as values
    values,
    scales,  # [2, kv_heads] fp32
    slots,  # [num_tokens]
    key_stride,
    value_stride,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FP8: tl.constexpr,
):
    """A program per token and BLOCK_H heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    real = (head < kv_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    inner = head[:, None] * HEAD_DIM + dims[None, :]
    target = tl.load(slots + token).to(tl.int64) * (kv_heads * HEAD_DIM) + inner
    k = tl.load(key + token * key_stride + inner, mask=real)
    v = tl.load(value + token * value_stride + inner, mask=real)
    if FP8:
        known = head < kv_heads
        k = to_fp8(k, tl.load(scales + head, mask=known, other=1.0)[:, None])
        v = to_fp8(v, tl.load(scales + kv_heads + head, mask=known, other=1.0)[:, None])
    tl.store(keys + target, k.to(keys.dtype.element_ty), mask=real)
    tl.store(values + target, v.to(values.dtype.element_ty), mask=real)


@kept
@triton.jit(do_not_specialize_on_alignment=["scales", "slots", "angles"])
def norm_rotate_store(
    query,  # [num_tokens, heads, HEAD_DIM], written
    key,  # [num_tokens, kv_heads, HEAD_DIM], written where KEPT
    merged,  # [num_tokens, heads + 2 * kv_heads, HEAD_DIM], tokens strided
    norms,  # [heads + kv_heads, HEAD_DIM]
    angles,  # [num_tokens, 2, HEAD_DIM / 2] fp32: cosines, sines
    keys,  # [num_blocks, PAGE, kv_heads, HEAD_DIM], as values
    values,
    scales,  # [2, kv_heads] fp32
    slots,  # [num_tokens]
    stride,
    heads,
    kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    FP8: tl.constexpr,
    KEPT: tl.constexpr,
):
    """A program per token and BLOCK_H heads: of queries, of keys and of values, whichever they are.

    With x = (a, b) in halves the rotation is (a cos - b sin, b cos + a sin). One rounding, at the end.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_D)
    inside = (dims < HEAD_DIM)[None, :]
    across = tl.where(dims < half, dims + half, dims - half)  # the other half's
    turned = head < heads + kv_heads
    real = (head < heads + 2 * kv_heads)[:, None] & inside
    source = merged + token * stride + head[:, None] * HEAD_DIM
    raw = tl.load(source + dims[None, :], mask=real, other=0.0)
    x = raw.to(tl.float32)
    other = x
    if ROTATED:
        other = tl.load(source + across[None, :], mask=real & turned[:, None], other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        mine, row = turned[:, None] & inside, norms + head[:, None] * HEAD_DIM
        x = tl.where(turned[:, None], x * inverse, x)
        x = x * tl.load(row + dims[None, :], mask=mine, other=1.0).to(tl.float32)
        if ROTATED:
            other = other * inverse * tl.load(row + across[None, :], mask=mine, other=1.0).to(tl.float32)
    if ROTATED:
        pair = angles + token * HEAD_DIM + dims % half
        cos = tl.load(pair, mask=dims < HEAD_DIM, other=1.0)[None, :]
        sin = tl.load(pair + half, mask=dims < HEAD_DIM, other=0.0)[None, :]
        sin = tl.where((dims < half)[None, :], -sin, sin)
        x = tl.where(turned[:, None], x * cos + other * sin, x)

    asks = head < heads
    place = (token * heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(query + place, x.to(query.dtype.element_ty), mask=asks[:, None] & inside)
    slot = tl.load(slots + token).to(tl.int64) * kv_heads
    key_head, value_head = head - heads, head - heads - kv_heads
    is_key, is_value = (head >= heads) & turned, (value_head >= 0) & (value_head < kv_heads)
    if KEPT:
        place = (token * kv_heads + key_head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(key + place, x.to(key.dtype.element_ty), mask=is_key[:, None] & inside)
    k, v = x, x
    if FP8:
        k = to_fp8(x, tl.load(scales + key_head, mask=is_key, other=1.0)[:, None])
        v = to_fp8(x, tl.load(scales + kv_heads + value_head, mask=is_value, other=1.0)[:, None])
    key_place = (slot + key_head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(keys + key_place, k.to(keys.dtype.element_ty), mask=is_key[:, None] & inside)
    value_place = (slot + value_head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(values + value_place, v.to(values.dtype.element_ty), mask=is_value[:, None] & inside)


@triton.jit
def to_fp8(x, scale):
    """Divide by the scale and round to float8_e4m3fn; what is beyond its range becomes its largest number."""
    # The quotient of `/` is off by a bit or two here and there, and falls to the other side of a tie.
    return tl.clamp(tl.div_rn(x.to(tl.float32), scale), -FP8_MAX, FP8_MAX, tl.PropagateNan.ALL).to(tl.float8e4nv)
