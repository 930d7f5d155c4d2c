"""Attention by our Triton kernels, on CUDA; imported only where it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionBackend, AttentionSpec, LayerCache, MergedHeads, StepTensors
from engine.attention.tiles import cut
from engine.attention.tuned import Tile, Tuning, padded, tuning_of
from engine.kernels.triton_attend import attend
from engine.kernels.triton_combine import combine
from engine.kernels.triton_store import norm_rotate_store, store
from engine.upload import upload

LEAST_SPLIT = 128  # keys of a split below which its start and end cost more than it saves
MOST_SPLITS = 64
STORED_TOGETHER = 1024  # elements of a token that one program stores
COMBINED_TOGETHER = 16  # splits


@dataclass(frozen=True, slots=True)
class _Launch:
    """Tiles of queries that one launch takes, in every layer.

    tiles: row and first query of each, [num_tiles, 2]. size: how they are cut. tokens: queries of each.
    parts, weights: what `splits` of the keys give before they are joined; None where keys are not split.
    """

    tiles: Tensor
    size: Tile
    tokens: int
    splits: int = 1
    parts: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Metadata:
    step: StepTensors
    launches: tuple[_Launch, ...]


class TritonAttention(AttentionBackend):
    """Rows that decode, keys in splits, in one launch, queries of prompts in another; both read the cache alone.

    With `batch_invariant` all are launched as prompts are: a token has the same bits whether it was generated or is
    computed again as part of a prompt, elsewhere or after a preemption.
    """

    name = "triton"
    reads_unwritten = False
    rotates = True
    supports_graphs = True

    def __init__(self, spec: AttentionSpec, tuning: Tuning | None = None) -> None:
        """tuning: None = what is known to be best here."""
        super().__init__(spec)
        on_gpu = spec.device.type == "cuda"
        self._tuning = tuning or tuning_of(spec, torch.cuda.get_device_name(spec.device) if on_gpu else "")
        self._tokens = self._tuning.prefill.rows // spec.group  # of a tile of prompts
        self._programs = self._tuning.waves * (_processors(spec.device) if on_gpu else 4)
        self._all_rows = _identity(256, spec.device)
        self._graph_rows: dict[int, Tensor] = {}

    @override
    def prepare(self, step: StepTensors) -> _Metadata:
        layout = step.layout
        lengths = np.diff(layout.query_start_loc)
        longest = int(layout.seq_lens.max(initial=0))
        if lengths.max(initial=0) <= 1:
            return _Metadata(step, (self._decode(self._rows(len(lengths)), longest),))
        tiles = cut(layout, self._tokens)[:, :2]
        single = lengths[tiles[:, 0]] == 1
        count = int(single.sum())
        # Those with the most keys first, so that none of them is what the others have to be waited for.
        (listed,) = upload([np.concatenate((tiles[single], tiles[~single][::-1]))], self.spec.device)
        prompts = self._prompts(listed[count:])
        return _Metadata(step, (prompts, self._decode(listed[:count], longest)) if count else (prompts,))

    @override
    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> _Metadata:
        count = len(step.seq_lens)
        # Kept for good, and made before anything is recorded: a graph keeps the address and need not make them again.
        if count not in self._graph_rows:
            self._graph_rows[count] = _identity(count, self.spec.device)
        return _Metadata(step, (self._decode(self._graph_rows[count], max_seq_len),))

    def _rows(self, count: int) -> Tensor:
        if len(self._all_rows) < count:
            self._all_rows = _identity(2 * count, self.spec.device)
        return self._all_rows[:count]

    def _prompts(self, tiles: Tensor) -> _Launch:
        return _Launch(tiles, self._tuning.prefill, self._tokens)

    def _decode(self, tiles: Tensor, longest: int) -> _Launch:
        """Return the launch of rows of one query. longest: keys that a row may have."""
        spec, size = self.spec, self._tuning.decode
        if spec.batch_invariant:
            return self._prompts(tiles)
        splits = self._splits(len(tiles), longest)
        if splits == 1:
            return _Launch(tiles, size, 1)
        shape = (len(tiles), spec.num_heads, splits)
        parts = torch.empty(*shape, spec.head_dim, device=spec.device)
        return _Launch(tiles, size, 1, splits, parts, torch.empty(shape, device=spec.device))

    def _splits(self, rows: int, longest: int) -> int:
        seen = min(longest, max(self.spec.windows)) if all(self.spec.windows) else longest
        wanted = triton.cdiv(self._programs, max(rows * self.spec.num_kv_heads, 1))
        return max(1, min(wanted, seen // LEAST_SPLIT, MOST_SPLITS))

    @override
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: _Metadata, window: int
    ) -> Tensor:
        spec = self.spec
        tokens, kv_heads, head_dim = key.shape
        together = self._stored_together()
        store[tokens, triton.cdiv(kv_heads, together)](
            *(key, value, cache.keys, cache.values, cache.scales, metadata.step.slot_mapping),
            *(key.stride(0), value.stride(0), kv_heads),
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_H=together,
            FP8=spec.fp8_cache,
        )
        return self._attend(query, cache, metadata, window)

    @override
    def forward_merged(self, merged: MergedHeads, cache: LayerCache, metadata: _Metadata, window: int) -> Tensor:
        if merged.norms is None and merged.rotation is None:
            return super().forward_merged(merged, cache, metadata, window)
        spec = self.spec
        tokens, all_heads, head_dim = merged.heads.shape
        query = merged.heads.new_empty(tokens, spec.num_heads, head_dim)
        together = self._stored_together()
        norm_rotate_store[tokens, triton.cdiv(all_heads, together)](
            *(query, merged.heads, merged.norms, merged.rotation, cache.keys, cache.values, cache.scales),
            *(metadata.step.slot_mapping, merged.heads.stride(0), spec.num_heads, spec.num_kv_heads, merged.eps),
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_H=together,
            NORMED=merged.norms is not None,
            ROTATED=merged.rotation is not None,
            FP8=spec.fp8_cache,
        )
        return self._attend(query, cache, metadata, window)

    def _attend(self, query: Tensor, cache: LayerCache, metadata: _Metadata, window: int) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for launch in metadata.launches:
            self._launch(out, query, cache, metadata.step, launch, window)
            if launch.parts is not None:
                self._combine(out, metadata.step, launch)
        return out

    def _launch(
        self, out: Tensor, query: Tensor, cache: LayerCache, step: StepTensors, launch: _Launch, window: int
    ) -> None:
        spec, size = self.spec, launch.size
        attend[len(launch.tiles), spec.num_kv_heads, launch.splits](
            *(out if launch.parts is None else launch.parts, launch.weights, query),
            *(cache.keys, cache.values, cache.scales),
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
            SPLIT=launch.parts is not None,
            WINDOWED=window > 0,
            CAPPED=spec.softcap > 0,
            FP8=spec.fp8_cache,
            UNIFORM=spec.batch_invariant,
            num_warps=size.warps,
            num_stages=size.stages,
        )

    def _combine(self, out: Tensor, step: StepTensors, launch: _Launch) -> None:
        spec = self.spec
        combine[len(launch.tiles), spec.num_heads](
            *(out, launch.parts, launch.weights, launch.tiles, step.query_start_loc, launch.splits),
            HEAD_DIM=spec.head_dim,
            BLOCK_D=padded(spec.head_dim),
            BLOCK_S=COMBINED_TOGETHER,
        )

    def _stored_together(self) -> int:
        """Return how many heads one program stores."""
        return max(1, STORED_TOGETHER // padded(self.spec.head_dim))


def _identity(count: int, device: torch.device) -> Tensor:
    """Return the tiles of `count` rows of one query."""
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return torch.stack((rows, torch.zeros_like(rows)), dim=1)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
