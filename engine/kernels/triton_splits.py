"""Shares the keys of decodes among programs by how many there are, and joins what these give."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.handles import kept


@kept
@triton.jit(
    do_not_specialize=["count", "room", "programs", "window"],
    do_not_specialize_on_alignment=["shares", "spans", "tiles", "lengths"],
)
def share_out(
    shares,  # [room, 3], written: row, which of its splits, and of how many; 0 = of none, nothing to do
    spans,  # [count, 2], written: first share and splits of each tile
    tiles,  # row of each tile, and 0, [count, 2]
    lengths,  # [num_rows], keys of each row
    count,
    room,  # count + programs, which is enough
    programs,  # per KV head that there should be
    window,  # most keys that a row is read of; 0 = all
    LEAST: tl.constexpr,  # keys of a split
    MOST: tl.constexpr,  # splits of a row
    BLOCK: tl.constexpr,  # at least MOST
):
    """A program per tile. All splits have about as many keys, those of short rows fewer: none is waited for long."""
    mine = tl.program_id(0)
    total, longest = 0, 0
    for first in range(0, count, BLOCK):
        keys = keys_of(tiles, lengths, first + tl.arange(0, BLOCK), count, window)
        total += tl.sum(keys, 0)
        longest = tl.maximum(longest, tl.max(keys, 0))
    size = tl.maximum(tl.maximum(tl.cdiv(total, programs), tl.cdiv(longest, MOST)), LEAST)
    before, own = 0, 0
    for first in range(0, count, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        # A row without keys has a split, too, whose zeros are its result.
        splits = tl.maximum(tl.cdiv(keys_of(tiles, lengths, tile, count, window), size), 1)
        before += tl.sum(tl.where(tile < mine, splits, 0), 0)
        own += tl.sum(tl.where(tile == mine, splits, 0), 0)
    tl.store(spans + 2 * mine, before)
    tl.store(spans + 2 * mine + 1, own)
    split = tl.arange(0, BLOCK)
    share = shares + 3 * (before + split)
    tl.store(share, tl.full((BLOCK,), 0, tl.int32) + tl.load(tiles + 2 * mine), mask=split < own)
    tl.store(share + 1, split, mask=split < own)
    tl.store(share + 2, tl.full((BLOCK,), 0, tl.int32) + own, mask=split < own)
    if mine == count - 1:
        for first in range(before + own, room, BLOCK):
            idle = first + tl.arange(0, BLOCK)
            tl.store(shares + 3 * idle + 2, tl.full((BLOCK,), 0, tl.int32), mask=idle < room)


@triton.jit
def keys_of(tiles, lengths, tile, count, window):
    """Return how many keys are read for the row of each tile, 0 for those that there are not."""
    row = tl.load(tiles + 2 * tile, mask=tile < count, other=0)
    keys = tl.load(lengths + row, mask=tile < count, other=0)
    return tl.where(window > 0, tl.minimum(keys, window), keys)


@kept
@triton.jit(do_not_specialize_on_alignment=["spans", "tiles", "starts"])
def combine(
    out,  # [num_tokens, heads, HEAD_DIM]
    parts,  # [room, heads, HEAD_DIM] fp32
    weight,  # [room, heads] fp32, log2; -inf where a split has no keys, NaN of NaNs
    spans,  # first share and splits of each tile, [num_tiles, 2]
    tiles,  # row of each tile, and 0, [num_tiles, 2]
    starts,  # [num_rows + 1]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits that are summed at a time
):
    """A program per decoded token and head: a mean of its parts, weighted by what their exponents sum to."""
    tile, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    splits = tl.load(spans + 2 * tile + 1)
    if splits > 1:  # one alone has written its result
        token = tl.load(starts + tl.load(tiles + 2 * tile)).to(tl.int64)
        share = tl.load(spans + 2 * tile).to(tl.int64)
        dims = tl.arange(0, BLOCK_D)
        inside = dims < HEAD_DIM
        best = float("-inf")
        for first in tl.range(0, splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            level = tl.load(weight + (share + split) * heads + head, mask=split < splits, other=float("-inf"))
            best = tl.maximum(best, tl.max(level, 0))
        level = tl.where(best == float("-inf"), 0.0, best)
        total = 0.0
        sums = tl.zeros((BLOCK_D,), tl.float32)
        for first in tl.range(0, splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            place = (share + split) * heads + head
            counted = tl.exp2(tl.load(weight + place, mask=split < splits, other=float("-inf")) - level)
            used = (counted > 0)[:, None] & inside[None, :]
            part = tl.load(parts + place[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0)
            total += tl.sum(counted, 0)
            sums += tl.sum(part * counted[:, None], 0)
        result = tl.where(total != 0, sums / tl.where(total != 0, total, 1.0), 0.0)
        tl.store(out + (token * heads + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)
