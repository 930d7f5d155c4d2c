"""Attention within chunks of a sequence (Llama 4), by any backend: each chunk is a short sequence of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
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
)


@dataclass(slots=True)
class ChunkLayout:
    """A `StepLayout` whose rows are the parts of a step's sequences that lie in one chunk each."""

    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    num_computed_tokens: Ints
    block_tables: Ints


def in_chunks(layout: StepLayout, chunk: int, block_size: int) -> ChunkLayout:
    """Cut the rows of a step where chunks begin; positions count from the beginning of each row's chunk.

    chunk: tokens, a multiple of `block_size`.
    """
    first, last = layout.num_computed_tokens // chunk, (layout.seq_lens - 1) // chunk
    parts = np.where(layout.seq_lens > layout.num_computed_tokens, last - first + 1, 1)
    row = np.repeat(np.arange(len(parts)), parts)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = number * chunk
    computed = np.maximum(layout.num_computed_tokens[row] - begin, 0)
    length = np.minimum(layout.seq_lens[row] - begin, chunk)
    blocks = chunk // block_size
    wide = np.pad(layout.block_tables, ((0, 0), (0, blocks)))
    columns = np.minimum(number[:, None] * blocks + np.arange(blocks), wide.shape[1] - 1)
    return ChunkLayout(
        layout.slot_mapping,
        np.concatenate(([0], np.cumsum(length - computed))).astype(np.int32),
        length.astype(np.int32),
        computed.astype(np.int32),
        wide[row[:, None], columns].astype(np.int32),
    )


class ChunkedAttention(PagedAttention):
    """Has another backend attend to the chunks of sequences.

    Its spec's `chunk` is a multiple of `block_size`, so that a chunk begins with a block.
    """

    def __init__(self, spec: AttentionSpec, inner: PagedAttention) -> None:
        super().__init__(spec)
        self._inner = inner
        self.name = inner.name
        self.rotates = inner.rotates
        self.reads_unwritten = inner.reads_unwritten

    @override
    def prepare(self, step: StepTensors) -> Any:
        layout = in_chunks(step.layout, self.spec.chunk, self.spec.block_size)
        device = step.block_tables.device
        return self._inner.prepare(
            replace(
                step,
                layout=layout,
                query_start_loc=torch.from_numpy(layout.query_start_loc).to(device),
                seq_lens=torch.from_numpy(layout.seq_lens).to(device),
                block_tables=torch.from_numpy(layout.block_tables).to(device),
            )
        )

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: Any,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._inner.forward(query, key, value, cache, metadata, window, sinks)

    @override
    def forward_merged(self, merged: MergedHeads, cache: LayerCache, metadata: Any, window: int) -> Tensor:
        return self._inner.forward_merged(merged, cache, metadata, window)
