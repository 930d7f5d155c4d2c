"""Cuts one step into tiles that plain torch attends to in one call each, with little padding.

Fresh prompts become *direct* tiles: all their keys are among the step's own tokens. Everything else becomes *paged*
tiles, whose keys are read through the block table; a decoding sequence is a paged piece of one query. All of it is
numpy on the host, once per step and window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import Ints, StepLayout

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A tile takes only pieces of at least this share of its longest, give or take a block.
FILL = 0.75


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tile may hold: keys (gathered ones should stay in the processor's cache) and scores per head."""

    keys: int
    scores: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The queries of a tile: `size` pieces padded to `width` queries each.

    first: token at which they lie side by side without padding, -1 where they do not.
    gather: token of each query, [size * width]; padding repeats a piece's last query.
    real: which of those are no padding, [num_real]; tokens: where their results go, [num_real].
    """

    size: int
    width: int
    first: int
    gather: Longs
    real: Longs
    tokens: Longs


@dataclass(frozen=True, slots=True)
class PagedTile:
    """Queries and the cache blocks of their keys, with what each query may see.

    blocks: [size * blocks per piece], 0 where a piece has fewer.
    visible: [size, width, blocks per piece * block size].
    """

    rows: Rows
    blocks: Ints
    visible: Bools


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of queries of one sequence each; arrays of one length."""

    sequence: Longs
    first: Longs  # position of the first query
    count: Longs  # queries
    token: Longs  # index of the first query among the step's tokens

    def take(self, chosen: Longs) -> _Pieces:
        return _Pieces(self.sequence[chosen], self.first[chosen], self.count[chosen], self.token[chosen])


def plan(
    layout: StepLayout, window: int, block_size: int, direct: Limits, paged: Limits
) -> tuple[list[Rows], list[PagedTile]]:
    """Return the direct and the paged tiles of a step for layers with this sliding window (0 = none)."""
    lengths = np.diff(layout.query_start_loc).astype(np.int64)
    fresh = (layout.num_computed_tokens == 0) & (lengths > 1)
    if window:
        fresh &= lengths <= window
    whole = _whole_sequences(layout, lengths, np.flatnonzero(fresh))
    tiles = [_rows(whole.take(group)) for group in _groups(whole.count, whole.count, direct)]
    rest = _whole_sequences(layout, lengths, np.flatnonzero(~fresh & (lengths > 0)))
    pieces = _cut(rest, paged.scores)
    keys = pieces.first + pieces.count
    if window:
        keys = np.minimum(keys, window + pieces.count - 1)
    paged_tiles = [
        _paged(layout, pieces.take(group), window, block_size) for group in _groups(pieces.count, keys, paged)
    ]
    return tiles, paged_tiles


def _whole_sequences(layout: StepLayout, lengths: Longs, chosen: Longs) -> _Pieces:
    return _Pieces(
        chosen,
        layout.num_computed_tokens[chosen].astype(np.int64),
        lengths[chosen],
        layout.query_start_loc[chosen].astype(np.int64),
    )


def _cut(whole: _Pieces, scores: int) -> _Pieces:
    """Cut runs whose scores would not fit a tile into shorter ones."""
    longest = np.maximum(scores // np.maximum(whole.first + whole.count, 1), 16)
    parts = -(-whole.count // longest)
    if (parts == 1).all():
        return whole
    owner = np.repeat(np.arange(len(parts)), parts)
    step = longest[owner]
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)) * step
    count = np.minimum(whole.count[owner] - offset, step)
    return _Pieces(whole.sequence[owner], whole.first[owner] + offset, count, whole.token[owner] + offset)


def _groups(counts: Longs, keys: Longs, limits: Limits) -> Iterator[Longs]:
    """Yield indices of pieces of similar size, within the limits (a single piece may exceed them)."""
    order = np.lexsort((-keys, -counts))
    counts, keys = counts[order], keys[order]
    start = 0
    while start < len(order):
        width, length = int(counts[start]), int(keys[start])
        most = max(1, min(limits.keys // length, limits.scores // (width * length)))
        nearby = slice(start, start + most)
        similar = (counts[nearby] >= width * FILL) & (keys[nearby] >= length * FILL - 16) & (keys[nearby] <= length)
        size = len(similar) if similar.all() else int(similar.argmin())
        yield order[start : start + size]
        start += size


def _rows(pieces: _Pieces) -> Rows:
    size, width = len(pieces.count), int(pieces.count.max())
    column = np.arange(width)
    gather = (pieces.token[:, None] + np.minimum(column, pieces.count[:, None] - 1)).reshape(-1)
    real = np.flatnonzero((column < pieces.count[:, None]).reshape(-1))
    tokens = gather[real]
    adjacent = len(real) == len(gather) and bool((gather == gather[0] + np.arange(len(gather))).all())
    return Rows(size, width, int(gather[0]) if adjacent else -1, gather, real, tokens)


def _paged(layout: StepLayout, pieces: _Pieces, window: int, block_size: int) -> PagedTile:
    rows = _rows(pieces)
    last = pieces.first + pieces.count - 1
    low = np.maximum(pieces.first - window + 1, 0) // block_size if window else np.zeros_like(last)
    end = last // block_size + 1
    column = low[:, None] + np.arange(int((end - low).max()))
    known = np.minimum(column, layout.block_tables.shape[1] - 1)
    blocks = np.where(column < end[:, None], layout.block_tables[pieces.sequence[:, None], known], 0)
    query = pieces.first[:, None] + np.minimum(np.arange(rows.width), pieces.count[:, None] - 1)
    key = (low * block_size)[:, None] + np.arange(column.shape[1] * block_size)
    visible = key[:, None, :] <= query[:, :, None]
    if window:
        visible &= key[:, None, :] > query[:, :, None] - window
    return PagedTile(rows, blocks.reshape(-1), visible)
