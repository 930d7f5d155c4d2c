"""Products in Triton: those whose rows have the same bits in any company, and those with weights in eight bits.

A library picks its kernel by the number of rows, and another kernel adds in another order (Thinking Machines,
"Defeating Nondeterminism in LLM Inference"). For `batch_invariant` the tiling follows from the weight's shape alone,
every sum runs over the inputs from first to last in one program, and a row is worked on alike wherever it lies. That
costs speed. Imported only where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, FEW_ROWS, LARGEST_E4M3, LEAST_SCALE, dequantised_product, quantise_rows
from engine.kernels.triton_launch import ceil_div, kept, next_power_of_2
from parallel.linear import LinearMethod

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = 4096  # outputs up to which tiles are narrow, so that few rows still keep many multiprocessors busy


class Tiling(NamedTuple):
    """Rows, outputs and inputs of a tile, and how a program is run."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


class TritonLinear(LinearMethod):
    """A weight and its tiling. The weight stays the layer's own, which may move it.

    Raises `ValueError` for a dtype that the kernel is not written for.
    """

    def __init__(self, weight: Tensor) -> None:
        if weight.dtype not in DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"products of {weight.dtype} have no fixed tiling; it multiplies {kinds}")
        self.weight = weight  # [out, in]
        outs, ins = weight.shape
        self._tiling = tiling_of(outs, ins, weight.dtype)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, ins = x.shape
        outs = self.weight.shape[0]
        out = x.new_empty(rows, outs)
        tiling = self._tiling
        grid = (ceil_div(rows, tiling.rows) * ceil_div(outs, tiling.outs),)
        if rows:
            _multiply[grid](
                x, self.weight, bias, out, rows, outs, ins, x.stride(0), self.weight.stride(0),
                ROWS=tiling.rows, OUTS=tiling.outs, INS=tiling.ins, BIAS=bias is not None,
                WHOLE=ins % tiling.ins == 0, num_warps=tiling.warps, num_stages=tiling.stages,
            )  # fmt: skip
        return out


def tiling_of(outs: int, ins: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling of a weight, [outs, ins]: of its shape and dtype alone, never of the rows to come."""
    # Three stages: the next tiles are loaded while these are multiplied. With two the loads are waited for.
    if dtype is torch.float32:
        return Tiling(32, 64, 32, 4, 3)
    return Tiling(64, 64 if outs <= NARROW else 128, 64, 4, 3)


@triton.jit
def put_tile(
    total: tl.tensor,  # [ROWS, OUTS] in fp32
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    BIAS: tl.constexpr,
) -> None:
    """Write a tile of a product [rows, outs], with its bias."""
    if BIAS:
        total += tl.load(bias_ptr + out, mask=out < outs, other=0.0)[None, :].to(tl.float32)
    where = out_ptr + row[:, None].to(tl.int64) * outs + out[None, :]
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=(row[:, None] < rows) & (out[None, :] < outs))


# Triton would compile another program for one row, and for multiples of 16.
@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x_ptr: tl.tensor,  # [rows, ins], rows strided
    weight_ptr: tl.tensor,  # [outs, ins], rows strided
    bias_ptr: tl.tensor,  # [outs]
    out_ptr: tl.tensor,  # [rows, outs], written
    rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """A program sums one tile of the product over all inputs, INS at a time."""
    # Neighbouring programs share a tile of the weight, which is what there is most of.
    row_tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    out = (tl.program_id(0) // row_tiles) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, INS)
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
    weight_row = weight_ptr + out[None, :].to(tl.int64) * weight_stride
    has_row, has_out = row[:, None] < rows, out[None, :] < outs
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, ins, INS):
        at = start + step
        if WHOLE:
            x = tl.load(x_row + at[None, :], mask=has_row, other=0.0)
            weight = tl.load(weight_row + at[:, None], mask=has_out, other=0.0)
        else:
            x = tl.load(x_row + at[None, :], mask=has_row & (at[None, :] < ins), other=0.0)
            weight = tl.load(weight_row + at[:, None], mask=has_out & (at[:, None] < ins), other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    put_tile(total, bias_ptr, out_ptr, row, out, rows, outs, BIAS)


WIDEST = 32768  # elements of a row that a program holds in registers
TILE_ROWS = 16  # the least that matrix units take
TILE_INS = 128


def quantise_rows_in_one_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, size] in e4m3 and its scales [rows, 1] in fp32: the bits of `quantise_rows`."""
    rows, size = x.shape
    if x.dtype not in DTYPES or x.stride(1) != 1 or size > WIDEST or not rows:
        return quantise_rows(x)
    found = torch.empty(rows, size, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _quantise_rows[(rows,)](
        x, found, scales, x.stride(0), size,
        LIMIT=LARGEST_E4M3, LEAST=LEAST_SCALE, BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return found, scales


class TritonInt8Linear(LinearMethod):
    """weight [out, in] in int8 times scale [out]: widened on the way to the matrix units for few rows."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, ins = x.shape
        if rows > FEW_ROWS or x.dtype not in DTYPES or x.stride(1) != 1:
            return dequantised_product(x, self.weight, self.scale, bias)
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
    put_tile(total, bias_ptr, out_ptr, row, out, rows, outs, BIAS)
