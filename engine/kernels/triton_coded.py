"""Products in Triton with weights of four bits, and of eight, that groups of inputs scale: made plain on the way.

A tile of the weight is made plain in registers, in the dtype of the activations, and multiplied by the matrix units.
So few rows cost what reading codes costs. No GPU has run these: they are shown in the interpreter and by compiling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, FourBits
from engine.kernels.triton_launch import ceil_div, kept
from engine.kernels.triton_linear import NARROW, TILE_INS, TILE_ROWS, put_tile
from parallel.linear import LinearMethod


class TritonFourBitLinear(LinearMethod):
    """Codes that groups of inputs scale. All of `weight` stays the layer's own."""

    def __init__(self, weight: FourBits) -> None:
        self.weight = weight

    @staticmethod
    def supports(weight: FourBits) -> bool:
        """Whether the kernel multiplies by such a weight: both inputs of a byte are of one group."""
        return weight.codes.is_contiguous() and weight.codes.shape[1] % weight.scale.shape[1] == 0

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        weight, rows, (outs, pairs) = self.weight, len(x), self.weight.codes.shape
        scale, groups = as_bits(weight.scale), weight.scale.shape[1]
        out = x.new_empty(rows, outs)
        tile = 16 if outs <= NARROW else 32
        if rows:
            _multiply_codes[(ceil_div(rows, TILE_ROWS), ceil_div(outs, tile))](
                x, weight.codes, scale, weight.zero, weight.whole, bias, out, rows, outs, pairs, x.stride(0), groups,
                PER_GROUP=pairs // groups, ROWS=TILE_ROWS, OUTS=tile, PAIRS=TILE_INS // x.itemsize,
                BIAS=bias is not None, num_warps=4, num_stages=4,
            )  # fmt: skip
        return out

    @override
    def tensors(self) -> Iterator[Tensor]:
        yield from self.weight.held()

    @override
    def describe(self) -> str:
        kind = "E2M1 " if self.weight.zero is None else ""
        return f"{kind}TritonFourBitLinear {'x'.join(map(str, self.weight.shape))} by {self.weight.scale.shape[1]}"


def as_bits(scale: Tensor) -> Tensor:
    """Return scales as kernels take them: those in e4m3 as their bytes, which not every GPU widens by itself."""
    return scale.view(torch.uint8) if scale.dtype is E4M3 else scale


class TritonBlockLinear(LinearMethod):
    """e4m3 or int8 times a scale for each block of outputs and inputs; the activations are not quantised.

    weight [out, in], scale [out / rows, in / columns]. Both stay the layer's own.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = weight, scale

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether the kernel multiplies by such a weight."""
        return weight.dtype in (E4M3, torch.int8) and weight.is_contiguous()

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, (outs, ins) = len(x), self.weight.shape
        out = x.new_empty(rows, outs)
        tile = 16 if outs <= NARROW else 32
        if rows:
            _multiply_blocks[(ceil_div(rows, TILE_ROWS), ceil_div(outs, tile))](
                x, self.weight, self.scale, bias, out, rows, outs, ins, x.stride(0), self.scale.shape[1],
                BLOCK_OUTS=outs // self.scale.shape[0], BLOCK_INS=ins // self.scale.shape[1],
                ROWS=TILE_ROWS, OUTS=tile, INS=TILE_INS, BIAS=bias is not None, num_warps=4, num_stages=4,
            )  # fmt: skip
        return out

    @override
    def describe(self) -> str:
        held = str(self.weight.dtype).removeprefix("torch.")
        return "{} TritonBlockLinear {}x{} by {}x{}".format(held, *self.weight.shape, *self.scale.shape)


@triton.jit
def e2m1(codes: tl.tensor) -> tl.tensor:
    """Return the numbers of codes of 0 to 15 in fp32: read as those of float16, they have another unit."""
    bits = (codes & 8).to(tl.int16) << 12 | (codes & 7).to(tl.int16) << 9
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384


@triton.jit
def of_groups(
    row: tl.tensor,  # [1, OUTS], where scales or zeros of outputs begin
    start: tl.tensor,
    at: tl.tensor,  # [STEP], from `start` on
    has_out: tl.tensor,  # [1, OUTS]
    there: tl.tensor,  # [STEP, OUTS]
    PER_GROUP: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Return the scales, or zeros, of a step: [1, OUTS] where it has one group, else [STEP, OUTS]."""
    if PER_GROUP % STEP == 0:
        found = tl.load(row + start // PER_GROUP, mask=has_out, other=0)
    else:
        found = tl.load(row + at[:, None] // PER_GROUP, mask=there, other=0)
    return found


@triton.jit
def in_fp32(scale: tl.tensor, FLOATS: tl.constexpr) -> tl.tensor:
    """Return scales in fp32, as `FourBits.scale_in_fp32`. In uint8 they are exponents, if `FLOATS` bytes of e4m3."""
    if FLOATS:
        # Read as those of float16, they have another unit.
        bits = (scale & 0x80).to(tl.int16) << 8 | (scale & 0x7F).to(tl.int16) << 7
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    elif scale.dtype == tl.uint8:
        bits = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23)  # 2^-127 is below the normal numbers
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = scale.to(tl.float32)
    return wide


@triton.jit
def multiply_codes(
    x_row: tl.tensor,  # [ROWS, 1], where rows begin
    codes_ptr: tl.tensor,  # [all outputs, pairs], the first of two inputs in the lower bits
    scale_ptr: tl.tensor,  # [all outputs, groups]
    zero_ptr: tl.tensor,  # [all outputs, groups], None where codes are numbers of E2M1
    whole_ptr: tl.tensor,  # [all outputs], None unless scales are of e4m3
    out: tl.tensor,  # [1, OUTS], which outputs
    has_row: tl.tensor,
    has_out: tl.tensor,
    pairs: tl.tensor,
    groups: tl.tensor,
    PER_GROUP: tl.constexpr,  # pairs
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Return a tile of a product, [ROWS, OUTS] in fp32."""
    step = tl.arange(0, PAIRS)
    codes_row, group_row = codes_ptr + out.to(tl.int64) * pairs, out.to(tl.int64) * groups
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, pairs, PAIRS):
        at = start + step
        there = has_out & (at[:, None] < pairs)
        codes = tl.load(codes_row + at[:, None], mask=there, other=0)
        scales = of_groups(scale_ptr + group_row, start, at, has_out, there, PER_GROUP, PAIRS)
        scale = in_fp32(scales, whole_ptr is not None)
        if zero_ptr is None:
            first, second = e2m1(codes & 15) * scale, e2m1(codes >> 4) * scale
        else:
            zero = of_groups(zero_ptr + group_row, start, at, has_out, there, PER_GROUP, PAIRS).to(tl.float32)
            first = ((codes & 15).to(tl.float32) - zero) * scale
            second = ((codes >> 4).to(tl.float32) - zero) * scale
        has_x = has_row & (at[None, :] < pairs)
        even = tl.load(x_row + 2 * at[None, :], mask=has_x, other=0.0)
        odd = tl.load(x_row + 2 * at[None, :] + 1, mask=has_x, other=0.0)
        total = tl.dot(even, first.to(even.dtype), total, input_precision="ieee")
        total = tl.dot(odd, second.to(odd.dtype), total, input_precision="ieee")
    if whole_ptr is not None:
        total *= tl.load(whole_ptr + out, mask=has_out, other=0.0)
    return total


@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply_codes(
    x_ptr: tl.tensor,  # [rows, 2 * pairs], rows strided
    codes_ptr: tl.tensor,  # of multiply_codes
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    bias_ptr: tl.tensor,  # [outs]
    out_ptr: tl.tensor,  # [rows, outs], written
    rows: tl.tensor,
    outs: tl.tensor,
    pairs: tl.tensor,
    x_stride: tl.tensor,
    groups: tl.tensor,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
    total = multiply_codes(
        x_row, codes_ptr, scale_ptr, zero_ptr, whole_ptr, out[None, :], row[:, None] < rows, out[None, :] < outs,
        pairs, groups, PER_GROUP, ROWS, OUTS, PAIRS,
    )  # fmt: skip
    put_tile(total, bias_ptr, out_ptr, row, out, rows, outs, BIAS)


@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply_blocks(
    x_ptr: tl.tensor,  # [rows, ins], rows strided
    weight_ptr: tl.tensor,  # [outs, ins]
    scale_ptr: tl.tensor,  # [outs / BLOCK_OUTS, groups]
    bias_ptr: tl.tensor,  # [outs]
    out_ptr: tl.tensor,  # [rows, outs], written
    rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    groups: tl.tensor,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, INS)
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
    weight_row = weight_ptr + out[None, :].to(tl.int64) * ins
    scale_row = scale_ptr + out[None, :] // BLOCK_OUTS * groups
    has_row, has_out = row[:, None] < rows, out[None, :] < outs
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, ins, INS):
        at = start + step
        there = has_out & (at[:, None] < ins)
        weight = tl.load(weight_row + at[:, None], mask=there)  # there is no zero that int8 and e4m3 share
        weight = tl.where(there, weight.to(tl.float32), 0.0)
        scale = of_groups(scale_row, start, at, has_out, there, BLOCK_INS, INS)
        x = tl.load(x_row + at[None, :], mask=has_row & (at[None, :] < ins), other=0.0)
        total = tl.dot(x, (weight * scale).to(x.dtype), total, input_precision="ieee")
    put_tile(total, bias_ptr, out_ptr, row, out, rows, outs, BIAS)
