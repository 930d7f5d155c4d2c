"""Products of many experts in one launch, in Triton: rows in the order of their experts, each times its own weight.

The host need not know how many rows an expert gets: programs are launched for as many tiles as there can be, and find
on the device which rows theirs are, so that a step with experts can be recorded in a CUDA graph. A row's sum runs
over the inputs from first to last in one program. Source of the idea: MegaBlocks (Gale et al., arXiv 2211.15841).
Imported only where it is chosen: a machine without a GPU has no triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import GroupedProduct
from engine.kernels.triton_coded import as_bits, multiply_codes, of_groups
from engine.kernels.triton_launch import ceil_div, kept, next_power_of_2
from engine.kernels.triton_linear import DTYPES, NARROW, Tiling, put_tile
from parallel.linear import ParallelLinear

FEW = 16  # rows of an expert up to which its weight is read for one tile of the least rows


class TritonGroupedProduct(GroupedProduct):
    """Weights of experts, alike in shape and dtype, in one tensor, [experts, out, in]; the layers keep views of it.

    They may be plain; in int8 or e4m3, with a scale for each output or each block; or in four bits (see `FourBits`).
    They are widened on the way to the matrix units: rows stay as they are.
    """

    def __init__(self, layers: Sequence[ParallelLinear]) -> None:
        first = layers[0]
        self._coded = first.weight.dtype is torch.uint8
        self._weight = _stack([layer.weight for layer in layers])
        quantised = first.weight.dtype not in DTYPES
        self._scale = _stack([layer.weight_scale for layer in layers]) if quantised else None
        zeros = self._coded and hasattr(first, "weight_zero")
        self._zero = _stack([layer.weight_zero for layer in layers]) if zeros else None
        whole = self._coded and hasattr(first, "weight_global_scale")
        self._whole = _stack([layer.weight_global_scale for layer in layers]) if whole else None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _stack(biases) if biases else None
        self._fixed = False

    @override
    def fix_tiling(self) -> None:
        self._fixed = True

    @override
    def apply(self, x: Tensor, ends: Tensor, biased: bool = True) -> Tensor:
        rows = len(x)
        experts, outs, width = self._weight.shape
        out = x.new_empty(rows, outs)
        if not rows:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        few = rows <= FEW * experts and not self._fixed
        tiling = grouped_tiling(few, outs, x.dtype)
        tiles = rows // tiling.rows + min(rows, experts)  # each expert may have one that is not full
        grid = tiles, ceil_div(outs, tiling.outs)
        bias = self._bias if biased else None
        sizes = rows, outs, width, x.stride(0), experts
        tile = {"ROWS": tiling.rows, "OUTS": tiling.outs, "EXPERTS": next_power_of_2(experts)}
        run = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        if self._coded and self._scale is not None:
            groups = self._scale.shape[2]
            _multiply_grouped_codes[grid](
                *(x, self._weight, as_bits(self._scale), self._zero, self._whole, bias, ends, out, *sizes, groups),
                PER_GROUP=width // groups, PAIRS=tiling.ins // 2, **tile, **run,
            )  # fmt: skip
            return out
        block_outs = groups = 0
        if self._scale is not None and self._scale.ndim == 3:
            block_outs, groups = outs // self._scale.shape[1], self._scale.shape[2]
        _multiply_grouped[grid](
            *(x, self._weight, self._scale, bias, ends, out, *sizes, groups),
            BLOCK_OUTS=block_outs, BLOCK_INS=width // groups if groups else 0, INS=tiling.ins,
            SCALED=self._scale is not None, **tile, **run,
        )  # fmt: skip
        return out


def grouped_tiling(few: bool, outs: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling of experts' products. few: whether an expert gets few rows; outs: of a weight."""
    if dtype is torch.float32:
        return Tiling(16 if few else 32, 64, 32, 4, 3)
    if few:
        return Tiling(16, 64, 128, 4, 3)
    return Tiling(64, 64 if outs <= NARROW else 128, 64, 4, 3)


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return the parameters in one tensor, and make them views of it: in the dtype that holds all of them."""
    stacked = torch.stack([parameter.data for parameter in parameters])
    for parameter, own in zip(parameters, stacked, strict=True):
        parameter.data = own
    return stacked


@triton.jit
def own_rows(
    ends_ptr: tl.tensor,  # [experts] int64, the row behind the last of each
    tile: tl.tensor,
    experts: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of a tile, its first row and the row behind the expert's last, which is 0 for no tile."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + each, mask=each < experts, other=0)
    begin = tl.load(ends_ptr + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, tl.cdiv(end - begin, ROWS), 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    expert = tl.sum(tl.where(mine, each, 0), 0).to(tl.int64)
    first = tl.sum(tl.where(mine, begin + (tile - before) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply_grouped(
    x_ptr: tl.tensor,  # [rows, ins], rows strided
    weight_ptr: tl.tensor,  # [experts, outs, ins]
    scale_ptr: tl.tensor,  # [experts, outs] or [experts, outs / BLOCK_OUTS, groups] fp32
    bias_ptr: tl.tensor,  # [experts, outs]
    ends_ptr: tl.tensor,  # of own_rows
    out_ptr: tl.tensor,  # [rows, outs], written
    rows: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    experts: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,  # 0 = a scale for each output
    BLOCK_INS: tl.constexpr,
) -> None:
    """A program per tile of an expert's rows and of outputs."""
    expert, first, beyond = own_rows(ends_ptr, tl.program_id(0), experts, ROWS, EXPERTS)
    if first >= beyond:
        return
    row = first + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, INS)
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
    weight_row = weight_ptr + (expert * outs + out[None, :]) * ins
    has_row, has_out = row[:, None] < beyond, out[None, :] < outs
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, ins, INS):
        at = start + step
        x = tl.load(x_row + at[None, :], mask=has_row & (at[None, :] < ins), other=0.0)
        inside = has_out & (at[:, None] < ins)
        if SCALED:
            weight = tl.load(weight_row + at[:, None], mask=inside)  # there is no zero that int8 and e4m3 share
            weight = tl.where(inside, weight.to(tl.float32), 0.0)
            if BLOCK_OUTS:
                blocks = (expert * (outs // BLOCK_OUTS) + out[None, :] // BLOCK_OUTS) * groups
                weight *= of_groups(scale_ptr + blocks, start, at, has_out, inside, BLOCK_INS, INS)
            weight = weight.to(x.dtype)
        else:
            weight = tl.load(weight_row + at[:, None], mask=inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if SCALED and not BLOCK_OUTS:
        total *= tl.load(scale_ptr + expert * outs + out, mask=out < outs, other=0.0)[None, :]
    if bias_ptr is not None:
        bias_ptr += expert * outs
    put_tile(total, bias_ptr, out_ptr, row, out, beyond, outs, bias_ptr is not None)


@kept
@triton.jit(do_not_specialize=["rows"])
def _multiply_grouped_codes(
    x_ptr: tl.tensor,  # [rows, 2 * pairs], rows strided
    codes_ptr: tl.tensor,  # [experts, outs, pairs]
    scale_ptr: tl.tensor,  # [experts, outs, groups]
    zero_ptr: tl.tensor,  # likewise, uint8; None where codes are numbers of E2M1
    whole_ptr: tl.tensor,  # [experts, outs], None unless scales are of e4m3
    bias_ptr: tl.tensor,  # [experts, outs]
    ends_ptr: tl.tensor,  # of own_rows
    out_ptr: tl.tensor,  # [rows, outs], written
    rows: tl.tensor,
    outs: tl.tensor,
    pairs: tl.tensor,
    x_stride: tl.tensor,
    experts: tl.tensor,
    groups: tl.tensor,
    PER_GROUP: tl.constexpr,  # pairs
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """A program per tile of an expert's rows and of outputs."""
    expert, first, beyond = own_rows(ends_ptr, tl.program_id(0), experts, ROWS, EXPERTS)
    if first >= beyond:
        return
    row = first + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    total = multiply_codes(
        x_ptr + row[:, None].to(tl.int64) * x_stride, codes_ptr, scale_ptr, zero_ptr, whole_ptr,
        expert * outs + out[None, :], row[:, None] < beyond, out[None, :] < outs, pairs, groups,
        PER_GROUP, ROWS, OUTS, PAIRS,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += expert * outs
    put_tile(total, bias_ptr, out_ptr, row, out, beyond, outs, bias_ptr is not None)
