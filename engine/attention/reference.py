"""Attention in plain torch: the backend of any device, and the yardstick of all others.

A step is cut into tiles that torch attends to in one call each, with little padding. Fresh prompts become *direct*
tiles: all their keys are among the step's own tokens. Everything else becomes *paged* tiles, whose keys are read
through the block table; a decoding sequence is a paged piece of one query. The cutting is numpy on the host, once
per step and window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, Ints, LayerCache, PagedAttention, StepLayout, StepTensors

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


# Gathered keys of a paged tile: small enough to stay in the processor's cache until they are multiplied.
TILE_KEY_BYTES = 2 << 20
TILE_SCORES = 1 << 21
DIRECT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Queries:
    """`Rows` on the device."""

    rows: Rows
    gather: Tensor
    real: Tensor | None  # None where nothing is padded
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class _Paged:
    """`PagedTile` on the device. mask: what is added to the scores, [size, 1, width, keys]."""

    queries: _Queries
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Metadata:
    slot_mapping: Tensor
    direct: dict[int, list[_Queries]]  # window -> tiles
    paged: dict[int, list[_Paged]]


class ReferenceAttention(PagedAttention):
    """Gathers the cache blocks of a few sequences at a time and attends to them with torch's fused attention."""

    name = "reference"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.group = spec.num_heads // spec.num_kv_heads
        key_bytes = spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        self._paged_limits = Limits(max(TILE_KEY_BYTES // key_bytes, spec.block_size), TILE_SCORES)
        self._direct_limits = Limits(DIRECT_TOKENS, TILE_SCORES * 8)
        self._scratch = torch.empty(2, 0, dtype=spec.dtype, device=spec.device)

    @override
    def prepare(self, step: StepTensors) -> _Metadata:
        direct: dict[int, list[_Queries]] = {}
        paged: dict[int, list[_Paged]] = {}
        for window in self.spec.windows:
            rows, tiles = plan(step.layout, window, self.spec.block_size, self._direct_limits, self._paged_limits)
            direct[window] = [self._queries(each) for each in rows]
            paged[window] = [self._paged(tile) for tile in tiles]
        most = max((len(tile.blocks) for tiles in paged.values() for tile in tiles), default=0)
        self._reserve(most)
        return _Metadata(step.slot_mapping, direct, paged)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: _Metadata,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        stores = ((cache.keys, key), (cache.values, value))
        for store, new in stores[:1] if self.spec.latent else stores:
            store.flatten(0, 1).index_copy_(0, metadata.slot_mapping, new)
        out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        for queries in metadata.direct[window]:
            own_query, own_key, own_value = (_pick(each, queries) for each in (query, key, value))
            _place(out, queries, self._attend(own_query, own_key, own_value, sinks=sinks))
        for tile in metadata.paged[window]:
            keys = self._gather(0, cache.keys, tile)
            latent = self.spec.latent
            values = keys[..., :latent] if latent else self._gather(1, cache.values, tile)
            _place(out, tile.queries, self._attend(_pick(query, tile.queries), keys, values, tile.mask, sinks))
        return out

    def _queries(self, rows: Rows) -> _Queries:
        device = self.spec.device
        real = None if len(rows.real) == len(rows.gather) else torch.from_numpy(rows.real).to(device)
        return _Queries(
            rows, torch.from_numpy(rows.gather).to(device), real, torch.from_numpy(rows.tokens).to(device)
        )

    def _paged(self, tile: PagedTile) -> _Paged:
        device = self.spec.device
        visible = torch.from_numpy(tile.visible).to(device).unsqueeze(1)
        mask = torch.zeros(visible.shape, dtype=self.spec.dtype, device=device)
        mask.masked_fill_(visible.logical_not_(), float("-inf"))
        return _Paged(self._queries(tile.rows), torch.from_numpy(tile.blocks).to(device), mask)

    def _reserve(self, blocks: int) -> None:
        spec = self.spec
        size = blocks * spec.block_size * spec.num_kv_heads * spec.head_dim
        if self._scratch.shape[1] < size:
            self._scratch = torch.empty(2, size, dtype=spec.dtype, device=spec.device)

    def _gather(self, index: int, store: Tensor, tile: _Paged) -> Tensor:
        """Return the tile's keys (0) or values (1): [size, keys, num_kv_heads, head_dim], in scratch memory."""
        count = len(tile.blocks)
        room = self._scratch[index, : count * store[0].numel()].view(count, *store.shape[1:])
        torch.index_select(store, 0, tile.blocks, out=room)
        return room.view(tile.queries.rows.size, -1, *store.shape[2:])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend causally (mask None) or as the mask says.

        query: [size, width, heads, head_dim]; key: [size, keys, kv_heads, head_dim], value: the same of value_dim.
        Returns [size, width, heads, value_dim].
        """
        size, width, heads, head_dim = query.shape
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        shape = (size, width, self.spec.num_kv_heads, self.group, head_dim)
        if width == 1:  # the query heads of a group take the place of the missing queries
            by_head = None if sinks is None else sinks.view(1, *shape[2:4], 1)
            grouped = self._scores(query.view(size, *shape[2:]), key, value, mask, by_head)
            return grouped.reshape(size, 1, heads, -1)
        by_group = query.view(shape).permute(3, 0, 2, 1, 4)  # [group, size, kv_heads, width, head_dim]
        of_group = [None] * self.group if sinks is None else list(sinks.view(1, -1, self.group, 1, 1).unbind(2))
        rows = zip(by_group.unbind(), of_group, strict=True)
        out = [self._scores(each, key, value, mask, sink) for each, sink in rows]
        return torch.stack(out, dim=3).transpose(1, 2).reshape(size, width, heads, -1)

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Plain attention over [size, kv_heads, queries, head_dim]. sinks: as the scores, but of width 1."""
        if not self.spec.softcap and sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.spec.scale
            )
        if mask is None:
            hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        scores = torch.matmul(query, key.transpose(2, 3)).float() * self.spec.scale
        if self.spec.softcap:
            scores = (scores / self.spec.softcap).tanh_() * self.spec.softcap
        scores = scores + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        return torch.matmul(weights.to(value.dtype), value)


def _pick(x: Tensor, queries: _Queries) -> Tensor:
    """Return the tile's rows of x, [num_tokens, heads, head_dim], as [size, width, heads, head_dim]."""
    rows = queries.rows
    if rows.first >= 0:
        picked = x[rows.first : rows.first + rows.size * rows.width]
    else:
        picked = x.index_select(0, queries.gather)
    return picked.unflatten(0, (rows.size, rows.width))


def _place(out: Tensor, queries: _Queries, result: Tensor) -> None:
    """Write a tile's result, [size, width, heads, head_dim], to its tokens in out."""
    flat = result.flatten(0, 1)
    if queries.rows.first >= 0:
        out[queries.rows.first : queries.rows.first + len(flat)] = flat
        return
    if queries.real is not None:
        flat = flat.index_select(0, queries.real)
    out.index_copy_(0, queries.tokens, flat)
