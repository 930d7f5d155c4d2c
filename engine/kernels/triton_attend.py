"""Paged attention in Triton: one kernel for decodes, chunks of prompts and whole prompts.

A program takes a tile of queries of one sequence, all heads of one KV head among them, so that those share its
loads, and one split of the keys they see; what the splits give is joined. Source: FlashAttention-2 (Dao), Flash-
Decoding (Dao et al.) for the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton_launch import kept


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
    sinks,  # [heads] fp32, None = there are none
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
        found = total != 0
        if sinks is not None:
            total += tl.exp2(tl.load(sinks + head) * LOG2_E - level)
        result = tl.where(found, sums / tl.where(found, total, 1.0), 0.0)
        tl.store(out + (token * heads + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# Of what changes from step to step, numbers that divide by 16 and addresses that do would get a kernel of their own,
# compiled while it is waited for.
@kept
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["scales", "tiles", "starts", "lengths", "tables"],
)
def attend(
    out,  # [num_tokens, heads, HEAD_DIM]
    parts,  # of splits, where a row has several: [num_tiles, heads, HEAD_DIM] fp32
    weight,  # of those: log2 of what exponents sum to, [num_tiles, heads] fp32
    query,  # [num_tokens, heads, HEAD_DIM]
    keys,  # [num_blocks, PAGE, kv_heads, HEAD_DIM], as values
    values,
    scales,  # [2, kv_heads] fp32, of fp8 keys and values
    sinks,  # a score of each head that has no value, [heads] fp32; None = there are none
    tiles,  # row and first query of each tile, [num_tiles, 2]; of splits: the shares of `triton_splits.share_out`
    starts,  # [num_rows + 1], queries of each row
    lengths,  # [num_rows], keys of each row
    tables,  # [num_rows, ...]
    scale,
    softcap,
    window,
    query_stride,
    table_stride,
    block_stride,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: TOKENS queries times GROUP heads, and what fills up a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,  # TOKENS is 1 then
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    UNIFORM: tl.constexpr,  # all keys by the same code, that bits do not depend on where the tile begins
):
    """A program per tile and KV head."""
    tile, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, split, splits = 0, 0, 1
    if SPLIT:
        row, split, splits = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        if splits == 0:
            return
    else:
        row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    # A row of padding has no key, and so no query that attends, but a result to be written.
    count = tl.load(starts + row + 1) - start
    offset = length - count

    rows = tl.arange(0, BLOCK_M)
    token, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (rows < TOKENS * GROUP) & (token < count)
    place = (start + token).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    position = offset + token
    q = tl.load(
        query + place[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )

    low, plain, high = keys_of_tile(
        offset + first, length, split, splits, window, TOKENS, BLOCK_N, SPLIT, WINDOWED, UNIFORM
    )
    factor = scale
    value_scale = 1.0
    if FP8:
        factor = scale * tl.load(scales + kv_head)
        value_scale = tl.load(scales + kv_heads + kv_head)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    key_head, value_head = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    slot_stride = kv_heads * HEAD_DIM
    best, total, sums = attend_keys(
        best, total, sums, q, key_head, value_head, table, low, plain, high, position, factor, softcap, window,
        block_stride, slot_stride, HEAD_DIM, PAGE, BLOCK_M, BLOCK_N, BLOCK_D, False, WINDOWED, CAPPED,
    )  # fmt: skip
    best, total, sums = attend_keys(
        best, total, sums, q, key_head, value_head, table, plain, high, high, position, factor, softcap, window,
        block_stride, slot_stride, HEAD_DIM, PAGE, BLOCK_M, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED,
    )  # fmt: skip

    write_tile(
        out, parts, weight, sinks, best, total, sums, value_scale, tile, splits, place, head, kv_heads * GROUP, real,
        rows < GROUP, HEAD_DIM, BLOCK_D, SPLIT,
    )  # fmt: skip


@triton.jit
def write_tile(
    out, parts, weight, sinks, best, total, sums, value_scale, tile, splits, place, head, heads, real, one_token,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write what the softmax gives to `out`, or, of one of several splits, to `parts` and `weight`.

    place, head: token and head of each row; real: whether there is one. one_token: rows of a tile that has one token.
    """
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    found = total != 0  # a NaN is found, too: it must come out, and no split of it be left out
    if sinks is not None:
        # Of several splits `combine` adds it, once.
        lone = tl.exp2(tl.load(sinks + head) * LOG2_E - tl.where(best == float("-inf"), 0.0, best))
        total += tl.where(found & (splits == 1), lone, 0.0)
    result = sums * tl.where(found, value_scale / tl.where(found, total, 1.0), 0.0)[:, None]
    if SPLIT:
        where = tile.to(tl.int64) * heads + head
        held = one_token & (splits > 1)
        level = tl.where(found, best + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
        tl.store(weight + where, level, mask=held)
        tl.store(parts + where[:, None] * HEAD_DIM + dims[None, :], result, mask=held[:, None] & inside[None, :])
        real = real & (splits == 1)
    where = place * heads + head
    result = result.to(out.dtype.element_ty)
    tl.store(out + where[:, None] * HEAD_DIM + dims[None, :], result, mask=real[:, None] & inside[None, :])


@triton.jit
def keys_of_tile(
    position, length, split, splits, window, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Return the first key to read, up to which key all queries see all of them, and up to which key to read.

    position: of the tile's first query, -1 in a row of padding. All but the last are multiples of BLOCK_N.
    """
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(position + TOKENS, length)
    if SPLIT:
        size = tl.cdiv(tl.cdiv(high - low, splits), BLOCK_N) * BLOCK_N
        low = low + split * size
        high = tl.minimum(low + size, high)
    plain = low
    if not (WINDOWED or UNIFORM):
        plain = tl.maximum(tl.minimum(position + 1, high) // BLOCK_N * BLOCK_N, low)
    return low, plain, high


@triton.jit
def attend_keys(
    best, total, sums, q, keys, values, table, low, beyond, high, position, factor, softcap, window,
    block_stride, slot_stride, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Take the keys [low, beyond) into the running softmax; MASKED: some of them are hidden from some queries.

    best: highest score of each row so far, in base 2. total, sums: of the exponents, and of the values they weigh.
    """
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    # The table is read one iteration ahead: Triton loads keys and values beside the products before theirs only where
    # their addresses wait for no load of the same iteration.
    block = blocks_of(table, low, high, PAGE, BLOCK_N)
    for first in tl.range(low, beyond, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        there = key < high
        slot = block.to(tl.int64) * block_stride + (key % PAGE) * slot_stride
        address = slot[:, None] + dims[None, :]
        # What lies beyond the last key was never written, and might be a NaN.
        block = blocks_of(table, first + BLOCK_N, high, PAGE, BLOCK_N)
        k = load_tile(keys + address, there, inside, MASKED, HEAD_DIM != BLOCK_D).to(q.dtype)
        v = load_tile(values + address, there, inside, MASKED, HEAD_DIM != BLOCK_D).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * factor
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)) * softcap
        scores = scores * LOG2_E
        if MASKED:
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that saw no key yet has no highest score to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(q.dtype), v, sums * shrink[:, None], input_precision="tf32x3")
        best = higher
    return best, total, sums


@triton.jit
def blocks_of(table, first, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the blocks of the keys from `first` on, the null block for those from `high` on."""
    key = first + tl.arange(0, BLOCK_N)
    return tl.load(table + key // PAGE, mask=key < high, other=0)


@triton.jit
def load_tile(address, there, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Load [keys, dims], zeros for keys that are not there and dims beyond the head's."""
    if MASKED and PADDED:
        return tl.load(address, mask=there[:, None] & inside[None, :], other=0.0)
    elif MASKED:  # noqa: RET505 - Triton knows no early return under a condition that is no constant
        return tl.load(address, mask=there[:, None], other=0.0)
    elif PADDED:
        return tl.load(address, mask=inside[None, :], other=0.0)
    else:
        return tl.load(address)
