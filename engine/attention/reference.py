"""Attention in plain torch: the CPU's backend, and the yardstick of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionBackend, AttentionSpec, LayerCache, StepTensors
from engine.attention.plan import Limits, PagedTile, Rows, plan

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


class ReferenceAttention(AttentionBackend):
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
    ) -> Tensor:
        for store, new in ((cache.keys, key), (cache.values, value)):
            store.flatten(0, 1).index_copy_(0, metadata.slot_mapping, new)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for queries in metadata.direct[window]:
            own = (_pick(each, queries) for each in (query, key, value))
            _place(out, queries, self._attend(*own))
        for tile in metadata.paged[window]:
            keys, values = (self._gather(i, store, tile) for i, store in enumerate((cache.keys, cache.values)))
            _place(out, tile.queries, self._attend(_pick(query, tile.queries), keys, values, tile.mask))
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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend causally (mask None) or as the mask says.

        query: [size, width, heads, head_dim]; key, value: [size, keys, kv_heads, head_dim]. Returns query's shape.
        """
        size, width, heads, head_dim = query.shape
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        shape = (size, width, self.spec.num_kv_heads, self.group, head_dim)
        if width == 1:  # the query heads of a group take the place of the missing queries
            grouped = self._scores(query.view(size, *shape[2:]), key, value, mask)
            return grouped.reshape(size, 1, heads, head_dim)
        by_group = query.view(shape).permute(3, 0, 2, 1, 4)  # [group, size, kv_heads, width, head_dim]
        out = [self._scores(each, key, value, mask) for each in by_group.unbind()]
        return torch.stack(out, dim=3).transpose(1, 2).reshape(size, width, heads, head_dim)

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Plain attention over [size, kv_heads, queries, head_dim]."""
        if not self.spec.softcap:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.spec.scale
            )
        if mask is None:
            hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        scores = torch.matmul(query, key.transpose(2, 3)).float() * (self.spec.scale / self.spec.softcap)
        weights = torch.softmax(scores.tanh_() * self.spec.softcap + mask, dim=-1)
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
