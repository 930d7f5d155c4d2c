"""Quantised products in Triton: rows of activations to fp8 in one pass, and few rows with int8 weights.

Imported only where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.handles import ceil_div, kept, next_power_of_2
from parallel.fp8 import E4M3, LARGEST, LEAST_SCALE, quantise_rows
from parallel.int8 import FEW_ROWS, Int8Linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 32768  # elements of a row that a program holds in registers
TILE_ROWS = 16  # the least that matrix units take
TILE_INS = 128
NARROW = 4096  # outputs up to which tiles are narrow, so that more multiprocessors have one


def quantise_rows_in_one_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, size] in e4m3 and its scales [rows, 1] in fp32: the bits of `parallel.fp8.quantise_rows`."""
    rows, size = x.shape
    if x.dtype not in DTYPES or x.stride(1) != 1 or size > WIDEST or not rows:
        return quantise_rows(x)
    found = torch.empty(rows, size, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _quantise_rows[(rows,)](
        x, found, scales, x.stride(0), size,
        LIMIT=LARGEST, LEAST=LEAST_SCALE, BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return found, scales


class TritonInt8Linear(Int8Linear):
    """weight [out, in] in int8 times scale [out]: widened on the way to the matrix units for few rows."""

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, ins = x.shape
        if rows > FEW_ROWS or x.dtype not in DTYPES or x.stride(1) != 1:
            return super().apply(x, bias)
        outs = len(self.weight)
        out = x.new_empty(rows, outs)
        tile = 16 if outs <= NARROW else 32
        if rows:
            _multiply_int8[(ceil_div(rows, TILE_ROWS), ceil_div(outs, tile))](
                x, self.weight, self.scale, bias, out, rows, outs, ins, x.stride(0),
                ROWS=TILE_ROWS, OUTS=tile, INS=TILE_INS, BIAS=bias is not None, num_warps=4, num_stages=4,
            )  # fmt: skip
        return out


@kept
@triton.jit
def _quantise_rows(
    x_ptr: tl.tensor,  # [rows, size], rows strided
    found_ptr: tl.tensor,  # [rows, size]
    scales_ptr: tl.tensor,  # [rows]
    stride: tl.tensor,
    size: tl.tensor,
    LIMIT: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LIMIT), LEAST)
    scaled = tl.clamp(tl.div_rn(x, scale), -LIMIT, LIMIT, tl.PropagateNan.ALL)
    tl.store(found_ptr + row * size + at, scaled.to(tl.float8e4nv), mask=at < size)
    tl.store(scales_ptr + row, scale)


@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply_int8(
    x_ptr: tl.tensor,  # [rows, ins], rows strided
    weight_ptr: tl.tensor,  # [outs, ins]
    scale_ptr: tl.tensor,  # [outs]
    bias_ptr: tl.tensor,  # [outs]
    out_ptr: tl.tensor,  # [rows, outs]
    rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    # Neighbouring programs share a tile of the weight, which comes from memory once then.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, INS)
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
    weight_row = weight_ptr + out[None, :].to(tl.int64) * ins
    has_row, has_out = row[:, None] < rows, out[None, :] < outs
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, ins, INS):
        at = start + step
        x = tl.load(x_row + at[None, :], mask=has_row & (at[None, :] < ins), other=0.0)
        weight = tl.load(weight_row + at[:, None], mask=has_out & (at[:, None] < ins), other=0)
        total = tl.dot(x, weight.to(tl.float32).to(x.dtype), total, input_precision="ieee")
    total *= tl.load(scale_ptr + out, mask=out < outs, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + out, mask=out < outs, other=0.0)[None, :].to(tl.float32)
    where = out_ptr + row[:, None].to(tl.int64) * outs + out[None, :]
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=has_row & has_out)
