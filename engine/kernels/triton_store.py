"""Writes a step's keys and values into the paged cache, in Triton; norms, rotates and converts to fp8 on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.handles import kept

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
