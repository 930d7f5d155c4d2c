"""Joins what splits of a sequence's keys gave: a mean weighted by what their exponents sum to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tiles", "starts"])
def combine(
    out,  # [num_tokens, heads, HEAD_DIM]
    parts,  # [num_tiles, heads, splits, HEAD_DIM] fp32
    weight,  # [num_tiles, heads, splits] fp32, log2; -inf where a split has no keys, NaN of NaNs
    tiles,  # row of each tile, and 0, [num_tiles, 2]
    starts,  # [num_rows + 1]
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits that are summed at a time
):
    """A program per decoded token and head."""
    tile, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = tl.load(starts + tl.load(tiles + 2 * tile)).to(tl.int64)
    base = (tile.to(tl.int64) * heads + head) * splits
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    best = float("-inf")
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        best = tl.maximum(best, tl.max(tl.load(weight + base + split, mask=split < splits, other=float("-inf")), 0))
    level = tl.where(best == float("-inf"), 0.0, best)
    total = 0.0
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        share = tl.exp2(tl.load(weight + base + split, mask=split < splits, other=float("-inf")) - level)
        # Splits without keys are not read: most are, where a graph has room for a long context.
        used = (share > 0)[:, None] & inside[None, :]
        part = tl.load(parts + (base + split)[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0)
        total += tl.sum(share, 0)
        sums += tl.sum(part * share[:, None], 0)
    result = tl.where(total != 0, sums / tl.where(total != 0, total, 1.0), 0.0)
    tl.store(out + (token * heads + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)
