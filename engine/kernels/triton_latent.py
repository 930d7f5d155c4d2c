"""Paged attention to latent vectors in Triton (MLA): one key a token for all heads, its first features the value.

As `triton_attend`, but for what a program holds: the key is read once for both products, in two parts, the value and
the features behind it that are rotated (512 and 64 of DeepSeek), so that neither is filled up to a power of two
together. Programs share the heads of a token, as many of them as fit its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton_attend import LOG2_E, blocks_of, keys_of_tile, load_tile, write_tile
from engine.kernels.triton_launch import kept


@kept
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tiles", "starts", "lengths", "tables"],
)
def attend_latent(
    out,  # [num_tokens, heads, LATENT]
    parts,  # of splits, where a row has several: [num_tiles, heads, LATENT] fp32
    weight,  # of those: log2 of what exponents sum to, [num_tiles, heads] fp32
    query,  # [num_tokens, heads, LATENT + ROTATED]
    keys,  # [num_blocks, PAGE, 1, LATENT + ROTATED]
    tiles,  # row and first query of each tile, [num_tiles, 2]; of splits: the shares of `triton_attend.share_out`
    starts,  # [num_rows + 1], queries of each row
    lengths,  # [num_rows], keys of each row
    tables,  # [num_rows, ...]
    scale,
    query_stride,
    table_stride,
    block_stride,
    HEADS: tl.constexpr,  # of a program
    TOKENS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: TOKENS queries times HEADS heads, and what fills up a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # LATENT and
    BLOCK_R: tl.constexpr,  # ROTATED, filled up
    SPLIT: tl.constexpr,  # TOKENS is 1 then
):
    """A program per tile and HEADS heads."""
    tile, part, all_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, split, splits = 0, 0, 1
    if SPLIT:
        row, split, splits = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        if splits == 0:
            return
    else:
        row, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    count = tl.load(starts + row + 1) - start
    offset = length - count

    rows = tl.arange(0, BLOCK_M)
    token, head = first + rows // HEADS, part * HEADS + rows % HEADS
    real = (rows < TOKENS * HEADS) & (token < count)
    place = (start + token).to(tl.int64)
    dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    heads = query + place[:, None] * query_stride + head[:, None] * (LATENT + ROTATED)
    q = tl.load(heads + dims[None, :], mask=real[:, None] & (dims < LATENT)[None, :], other=0.0)
    q_turned = tl.load(heads + LATENT + turned[None, :], mask=real[:, None] & (turned < ROTATED)[None, :], other=0.0)

    low, plain, high = keys_of_tile(offset + first, length, split, splits, 0, TOKENS, BLOCK_N, SPLIT, False, False)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    best, total, sums = attend_vectors(
        best, total, sums, q, q_turned, keys, table, low, plain, high, offset + token, scale, block_stride,
        LATENT, ROTATED, PAGE, BLOCK_N, BLOCK_D, BLOCK_R, False,
    )  # fmt: skip
    best, total, sums = attend_vectors(
        best, total, sums, q, q_turned, keys, table, plain, high, high, offset + token, scale, block_stride,
        LATENT, ROTATED, PAGE, BLOCK_N, BLOCK_D, BLOCK_R, True,
    )  # fmt: skip
    write_tile(
        out, parts, weight, None, best, total, sums, 1.0, tile, splits, place, head, all_parts * HEADS, real,
        rows < HEADS, LATENT, BLOCK_D, SPLIT,
    )  # fmt: skip


@triton.jit
def attend_vectors(
    best, total, sums, q, q_turned, keys, table, low, beyond, high, position, scale, block_stride,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the vectors [low, beyond) into the running softmax; as `triton_attend.attend_keys`."""
    dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    block = blocks_of(table, low, high, PAGE, BLOCK_N)  # read one iteration ahead, as there
    for first in tl.range(low, beyond, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        there = key < high
        vector = keys + (block.to(tl.int64) * block_stride + (key % PAGE) * (LATENT + ROTATED))[:, None]
        block = blocks_of(table, first + BLOCK_N, high, PAGE, BLOCK_N)
        k = load_tile(vector + dims[None, :], there, dims < LATENT, MASKED, LATENT != BLOCK_D)
        k_turned = load_tile(vector + LATENT + turned[None, :], there, turned < ROTATED, MASKED, ROTATED != BLOCK_R)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        scores = tl.dot(q_turned, tl.trans(k_turned), scores, input_precision="tf32x3") * (scale * LOG2_E)
        if MASKED:
            scores = tl.where(there[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(k.dtype), k, sums * shrink[:, None], input_precision="tf32x3")
        best = higher
    return best, total, sums
