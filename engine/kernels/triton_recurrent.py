"""Recurrent states on a GPU: short convolutions, unit vectors, and states that outer products are added to.

One program computes the tokens of one row one after another, the state in its registers: whatever the length of a
row, each token goes through the same operations, so that its bits do not depend on where a sequence is cut, nor on
what else is in its step. The host need not know how many tokens a row has. Sums are in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.recurrent import StateRows
from engine.kernels.triton_launch import ceil_div, kept, next_power_of_2

CHANNELS = 128  # of a convolution that one program computes
ELEMENTS = 4096  # of a state that one program holds


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
    """Return a causal convolution of each channel by itself; as `Kernels.short_conv`."""
    num_rows, (taps, size) = len(rows.sources), weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows and size:
        _short_conv_kernel[(num_rows, ceil_div(size, CHANNELS))](
            x, weight.contiguous(), bias, state, rows.starts, rows.sources, rows.targets, out, x.stride(0), size,
            TAPS=taps, SILU=silu, BLOCK=CHANNELS, num_warps=4,
        )  # fmt: skip
    return out


def unit_heads(x: Tensor, eps: float, scale: float) -> Tensor:
    """Return each head's vector in fp32 as long as `scale`; as `Kernels.unit_heads`. Heads lie side by side."""
    num_tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        _unit_heads_kernel[(num_tokens, heads)](
            x, out, x.stride(0), width, eps, scale, BLOCK=next_power_of_2(width), num_warps=1
        )
    return out


def outer_product_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    gain: Tensor,
    state: Tensor,
    rows: StateRows,
    delta: bool,
) -> Tensor:
    """Return what is read of states that outer products are added to; as `Kernels.outer_product_state`."""
    heads, width = value.shape[1:]
    groups, depth = key.shape[1:]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    deep = next_power_of_2(depth)
    block = max(1, min(next_power_of_2(width), ELEMENTS // deep))
    if out.numel() and len(rows.sources):
        _outer_product_state_kernel[(len(rows.sources), heads, ceil_div(width, block))](
            query, key, value, decay, gain, state, rows.starts, rows.sources, rows.targets, out,
            value.stride(0), heads, groups, depth, width,
            DELTA=delta, DEPTH=deep, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@kept
@triton.jit
def _short_conv_kernel(
    x: tl.tensor,  # [num_tokens, size]
    weight: tl.tensor,  # [TAPS, size] fp32
    bias: tl.tensor,  # [size] fp32
    state: tl.tensor,  # [slots, TAPS - 1, size] fp32
    starts: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,  # [num_tokens, size]
    stride: tl.tensor,
    size: tl.tensor,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    first, beyond = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    source, target = tl.load(sources + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    before = state + source * (TAPS - 1) * size + channel
    after = state + target * (TAPS - 1) * size + channel
    for token in range(first, beyond):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        if bias is not None:
            total = tl.load(bias + channel, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS):
            at = token - first + tap - (TAPS - 1)  # counted from the row's first token; below 0 it is in the state
            new = tl.load(x + (first + at) * stride + channel, mask=inside & (at >= 0), other=0.0)
            old = tl.load(before + (at + TAPS - 1) * size, mask=inside & (at < 0) & (source >= 0), other=0.0)
            seen = tl.where(at >= 0, new.to(tl.float32), old)
            total += tl.load(weight + tap * size + channel, mask=inside, other=0.0) * seen
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + token * size + channel, total.to(out.dtype.element_ty), mask=inside)
    # From the oldest on: where it is the source, too, an entry is read before one that lies behind it is written.
    for tap in tl.static_range(TAPS - 1):
        at = beyond - first + tap - (TAPS - 1)
        new = tl.load(x + (first + at) * stride + channel, mask=inside & (at >= 0), other=0.0)
        old = tl.load(before + (at + TAPS - 1) * size, mask=inside & (at < 0) & (source >= 0), other=0.0)
        tl.store(after + tap * size, tl.where(at >= 0, new.to(tl.float32), old), mask=inside)


@kept
@triton.jit
def _unit_heads_kernel(
    x: tl.tensor,  # [num_tokens, heads, width]
    out: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < width
    wide = tl.load(x + token * stride + head * width + feature, mask=inside, other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, 0) + eps)
    tl.store(out + (token * tl.num_programs(1) + head) * width + feature, wide * (scale * length), mask=inside)


@kept
@triton.jit
def _outer_product_state_kernel(
    query: tl.tensor,  # [num_tokens, groups, depth] fp32
    key: tl.tensor,
    value: tl.tensor,  # [num_tokens, heads, width]
    decay: tl.tensor,  # [num_tokens, heads] fp32
    gain: tl.tensor,
    state: tl.tensor,  # [slots, heads, depth, width] fp32
    starts: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,  # [num_tokens, heads, width]
    value_stride: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    DELTA: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (heads // groups)
    feature, place = tl.arange(0, DEPTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    deep, wide = feature < depth, place < width
    inside = deep[:, None] & wide[None, :]
    first, beyond = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    source, target = tl.load(sources + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    own = head * depth * width + feature[:, None] * width + place[None, :]
    now = tl.load(state + source * heads * depth * width + own, mask=inside & (source >= 0), other=0.0)
    for token in range(first, beyond):
        pair = (token * groups + group) * depth + feature
        k = tl.load(key + pair, mask=deep, other=0.0)
        change = tl.load(value + token * value_stride + head * width + place, mask=wide, other=0.0).to(tl.float32)
        now *= tl.load(decay + token * heads + head)
        if DELTA:
            change -= tl.sum(now * k[:, None], 0)
        now += k[:, None] * (change * tl.load(gain + token * heads + head))[None, :]
        read = tl.sum(now * tl.load(query + pair, mask=deep, other=0.0)[:, None], 0)
        tl.store(out + (token * heads + head) * width + place, read.to(out.dtype.element_ty), mask=wide)
    tl.store(state + target * heads * depth * width + own, now, mask=inside)
