"""Attention by our Triton kernels, on CUDA; imported only where it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from engine.attention.base import (
    AttentionSpec,
    Ints,
    LayerCache,
    MergedHeads,
    PagedAttention,
    StepLayout,
    StepTensors,
    cut,
)
from engine.attention.triton_fit import Tile, Tuning, padded, tuning_of, unmeasured
from engine.attention.whole_prompts import TorchPrompts, WholePrompts
from engine.device.gpu import upload
from engine.kernels.triton_attend import attend, combine, share_out
from engine.kernels.triton_kernels import norm_rotate_store, store
from engine.kernels.triton_launch import ceil_div

LEAST_SPLIT = 128  # keys of a split below which its start and end cost more than it saves
MOST_SPLITS = 64  # of a row
SHARED_OUT_TOGETHER = 256  # rows that `share_out` looks at
MIXED_PROMPTS = 16  # prompts, or chunks of them, that a graph has room for whatever their lengths
STORED_TOGETHER = 1024  # elements of a token that one program stores
COMBINED_TOGETHER = 16  # splits


@dataclass(frozen=True, slots=True)
class Splits:
    """What the rows of one query have been shared out to, and what is to be joined of that.

    rows: see `_identity`. shares, spans, parts, weights: see `triton_splits`.
    """

    rows: Tensor
    shares: Tensor
    spans: Tensor
    parts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of queries that one launch takes, in every layer.

    tiles: row and first query of each, [num_tiles, 2], or the shares of `splits`. size: how they are cut. tokens:
    queries of each. splits: None where each has all keys of its queries.
    """

    tiles: Tensor
    size: Tile
    tokens: int
    splits: Splits | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """What there is to launch, and the whole prompts that are another's."""

    step: StepTensors
    launches: tuple[Launch, ...]
    whole: WholePrompts | None = None


class TritonAttention(PagedAttention):
    """Rows that decode, keys in splits, in one launch, queries of prompts in another; both read the cache alone.

    Whole prompts may be left to torch, which attends to their own keys and values.

    With `batch_invariant` all are launched as prompts are: a token has the same bits whether it was generated or is
    computed again as part of a prompt, elsewhere or after a preemption.
    """

    name = "triton"
    reads_unwritten = False
    rotates = True
    supports_graphs = True
    supports_mixed_graphs = True

    def __init__(self, spec: AttentionSpec, tuning: Tuning | None = None, torchs: TorchPrompts | None = None) -> None:
        """tuning: None = what is known to be best here. torchs: takes whole prompts, None = these kernels do."""
        super().__init__(spec)
        on_gpu = spec.device.type == "cuda"
        self._tuning = tuning or (_tuning_here(spec) if on_gpu else unmeasured(spec))
        self._tokens = self._tuning.prefill.rows // spec.group  # of a tile of prompts
        self._head_parts = spec.num_kv_heads  # programs of a tile
        self._processors = _processors(spec.device) if on_gpu else 4
        self._all_rows = _identity(256, spec.device)
        self._graph_rows: dict[int, Tensor] = {}
        self._torchs = torchs

    @override
    def prepare(self, step: StepTensors) -> Metadata:
        layout = step.layout
        lengths = np.diff(layout.query_start_loc)
        if lengths.max(initial=0) <= 1:
            return Metadata(step, (self._decode(step, self._rows(len(lengths)), layout.seq_lens),))
        whole = self._torchs.find(step) if self._torchs else None
        tiles = cut(layout, self._tokens)[:, :2]
        if whole is not None:
            tiles = tiles[(tiles[:, 0] < whole.row) | (tiles[:, 0] >= whole.beyond_row)]
        return Metadata(step, self._launches(step, tiles, lengths[tiles[:, 0]] == 1), whole)

    def _launches(self, step: StepTensors, tiles: Ints, single: NDArray[np.bool_]) -> tuple[Launch, ...]:
        """Return the launches of tiles of queries. single: those of rows of one query."""
        if not len(tiles):
            return ()
        count = int(single.sum())
        # Those with the most keys first, so that none of them is what the others have to be waited for.
        (listed,) = upload([np.concatenate((tiles[single], tiles[~single][::-1]))], self.spec.device)
        prompts = (self._prompts(listed[count:]),) if count < len(tiles) else ()
        keys = step.layout.seq_lens[tiles[single, 0]]
        return (*prompts, self._decode(step, listed[:count], keys)) if count else prompts

    @override
    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> Metadata:
        count = len(step.seq_lens)
        # Kept for good, and made before anything is recorded: a graph keeps the address and need not make them again.
        if count not in self._graph_rows:
            self._graph_rows[count] = _identity(count, self.spec.device)
        return Metadata(step, (self._decode(step, self._graph_rows[count], np.array([max_seq_len])),))

    @override
    def mixed_plan_size(self, tokens: int, rows: int) -> int:
        return 2 * (rows + self._mixed_tiles(tokens))

    @override
    def mixed_plan(self, layout: StepLayout, tokens: int, rows: int) -> Ints | None:
        tiles = cut(layout, self._tokens)[:, :2]
        single = np.diff(layout.query_start_loc)[tiles[:, 0]] == 1
        decodes, prompts = tiles[single], tiles[~single][::-1]
        if len(prompts) > self._mixed_tiles(tokens):
            return None
        plan = np.zeros((rows + self._mixed_tiles(tokens), 2), np.int32)
        plan[:, 0] = rows  # the row of padding
        plan[: len(decodes)] = decodes
        plan[rows : rows + len(prompts)] = prompts
        return plan.reshape(-1)

    @override
    def mixed_metadata(self, step: StepTensors, plan: Tensor, max_seq_len: int) -> Metadata:
        rows, tiles = len(step.seq_lens) - 1, plan.view(-1, 2)
        decodes = self._decode(step, tiles[:rows], np.array([max_seq_len]))
        return Metadata(step, (self._prompts(tiles[rows:]), decodes))

    def _mixed_tiles(self, tokens: int) -> int:
        """Return how many tiles of prompts a graph of so many tokens has room for."""
        return ceil_div(tokens, self._tokens) + MIXED_PROMPTS

    def _rows(self, count: int) -> Tensor:
        if len(self._all_rows) < count:
            self._all_rows = _identity(2 * count, self.spec.device)
        return self._all_rows[:count]

    def _prompts(self, tiles: Tensor) -> Launch:
        return Launch(tiles, self._tuning.prefill, self._tokens)

    def _decode(self, step: StepTensors, rows: Tensor, lengths: NDArray[np.integer]) -> Launch:
        """Return the launch of rows of one query. lengths: keys that they have, or that one of them may have."""
        if self.spec.batch_invariant:
            return self._prompts(rows)
        whole = Launch(rows, self._tuning.decode, 1)
        seen = np.minimum(lengths, self._widest() or lengths)
        least = max(LEAST_SPLIT, ceil_div(int(seen.sum()), self._programs()))
        return self._split(step, whole) if seen.max(initial=0) > least else whole

    def _split(self, step: StepTensors, whole: Launch) -> Launch:
        """Share the keys out among programs, on the device: lengths differ each time that a graph is replayed."""
        spec, rows, count = self.spec, whole.tiles, len(whole.tiles)
        room = count + self._programs()
        made = partial(torch.empty, device=spec.device)
        shares, spans = made((room, 3), dtype=torch.int32), made((count, 2), dtype=torch.int32)
        share_out[count,](
            *(shares, spans, rows, step.seq_lens, count, room, self._programs(), self._widest()),
            LEAST=LEAST_SPLIT,
            MOST=MOST_SPLITS,
            BLOCK=SHARED_OUT_TOGETHER,
        )
        parts = made((room, spec.num_heads, spec.value_dim), dtype=torch.float32)
        weights = made((room, spec.num_heads), dtype=torch.float32)
        return replace(whole, tiles=shares, splits=Splits(rows, shares, spans, parts, weights))

    def _programs(self) -> int:
        """Return how many programs there should be for each KV head, or part of the heads that share one."""
        return ceil_div(self._tuning.waves * self._processors, self._head_parts)

    def _widest(self) -> int:
        """Return the most keys that any layer reads of a row, 0 = all."""
        return max(self.spec.windows) if all(self.spec.windows) else 0

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: Metadata,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        spec = self.spec
        tokens, kv_heads, head_dim = key.shape
        together = self._stored_together()
        store[tokens, ceil_div(kv_heads, together)](
            *(key, value, cache.keys, cache.values, cache.scales, metadata.step.slot_mapping),
            *(key.stride(0), value.stride(0), kv_heads),
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_H=together,
            FP8=spec.fp8_cache,
        )
        return self._attend(query, key, value, cache, metadata, window, sinks)

    @override
    def forward_merged(self, merged: MergedHeads, cache: LayerCache, metadata: Metadata, window: int) -> Tensor:
        if merged.norms is None and merged.rotation is None:
            return super().forward_merged(merged, cache, metadata, window)
        spec = self.spec
        tokens, all_heads, head_dim = merged.heads.shape
        query = merged.heads.new_empty(tokens, spec.num_heads, head_dim)
        key = None if metadata.whole is None else merged.heads.new_empty(tokens, spec.num_kv_heads, head_dim)
        together = self._stored_together()
        norm_rotate_store[tokens, ceil_div(all_heads, together)](
            *(query, key, merged.heads, merged.norms, merged.rotation, cache.keys, cache.values, cache.scales),
            *(metadata.step.slot_mapping, merged.heads.stride(0), spec.num_heads, spec.num_kv_heads, merged.eps),
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_H=together,
            NORMED=merged.norms is not None,
            ROTATED=merged.rotation is not None,
            FP8=spec.fp8_cache,
            KEPT=key is not None,
        )
        value = merged.heads[:, spec.num_heads + spec.num_kv_heads :]
        return self._attend(query, key, value, cache, metadata, window, merged.sinks)

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor,
        cache: LayerCache,
        metadata: Metadata,
        window: int,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention of all queries. key: may be None where there is no whole prompt."""
        out = query.new_empty(*query.shape[:2], self.spec.value_dim)
        if metadata.whole is not None and key is not None:
            metadata.whole.attend(out, query, key, value, window)
        for launch in metadata.launches:
            self._launch(out, query, cache, metadata.step, launch, window, sinks)
            if launch.splits is not None:
                self._combine(out, metadata.step, launch.splits, sinks)
        return out

    def _launch(
        self,
        out: Tensor,
        query: Tensor,
        cache: LayerCache,
        step: StepTensors,
        launch: Launch,
        window: int,
        sinks: Tensor | None,
    ) -> None:
        spec, size, splits = self.spec, launch.size, launch.splits
        attend[len(launch.tiles), spec.num_kv_heads](
            *((out, None, None, query) if splits is None else (out, splits.parts, splits.weights, query)),
            *(cache.keys, cache.values, cache.scales, sinks),
            *(launch.tiles, step.query_start_loc, step.seq_lens, step.block_tables),
            *(spec.scale, spec.softcap, window),
            *(query.stride(0), step.block_tables.stride(0), cache.keys.stride(0)),
            GROUP=spec.group,
            TOKENS=launch.tokens,
            HEAD_DIM=spec.head_dim,
            PAGE=spec.block_size,
            BLOCK_M=size.rows,
            BLOCK_N=size.keys,
            BLOCK_D=padded(spec.head_dim),
            SPLIT=splits is not None,
            WINDOWED=window > 0,
            CAPPED=spec.softcap > 0,
            FP8=spec.fp8_cache,
            UNIFORM=spec.batch_invariant,
            num_warps=size.warps,
            num_stages=size.stages,
        )

    def _combine(self, out: Tensor, step: StepTensors, splits: Splits, sinks: Tensor | None) -> None:
        spec = self.spec
        combine[len(splits.rows), spec.num_heads](
            *(out, splits.parts, splits.weights, sinks, splits.spans, splits.rows, step.query_start_loc),
            HEAD_DIM=spec.value_dim,
            BLOCK_D=padded(spec.value_dim),
            BLOCK_S=COMBINED_TOGETHER,
        )

    def _stored_together(self) -> int:
        """Return how many heads one program stores."""
        return max(1, STORED_TOGETHER // padded(self.spec.head_dim))


def _identity(count: int, device: torch.device) -> Tensor:
    """Return the tiles of `count` rows of one query."""
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return torch.stack((rows, torch.zeros_like(rows)), dim=1)


def _tuning_here(spec: AttentionSpec) -> Tuning:
    device = spec.device
    return tuning_of(spec, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
