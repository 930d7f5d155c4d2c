"""Products whose rows have the same bits in any company: one tiling per weight, no split of the sum.

A library picks its kernel by the number of rows, and another kernel adds in another order (Thinking Machines,
"Defeating Nondeterminism in LLM Inference"). Here the tiling follows from the weight's shape alone, every sum runs
over the inputs from first to last in one program, and a row is worked on alike wherever it lies. That costs speed, so
it is for `batch_invariant` only. Imported only where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.handles import ceil_div, kept
from parallel.methods import LinearMethod

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
    if BIAS:
        total += tl.load(bias_ptr + out, mask=out < outs, other=0.0)[None, :].to(tl.float32)
    where = out_ptr + row[:, None].to(tl.int64) * outs + out[None, :]
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=has_row & has_out)
