"""Attention to latent vectors (MLA) by our Triton kernels, on CUDA; imported only where it is chosen."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, LayerCache, StepTensors
from engine.attention.triton import Launch, Metadata, TritonAttention
from engine.attention.triton_fit import Tuning, heads_together, padded
from engine.kernels.triton_latent import attend_latent


class TritonLatentAttention(TritonAttention):
    """Cuts and shares out a step as `TritonAttention` does, and attends to the one vector of each token."""

    rotates = False  # queries and keys come rotated

    def __init__(self, spec: AttentionSpec, tuning: Tuning | None = None) -> None:
        """tuning: as of `TritonAttention`."""
        super().__init__(spec, tuning)
        self._heads = heads_together(spec.num_heads)
        self._tokens = self._tuning.prefill.rows // self._heads
        self._head_parts = spec.num_heads // self._heads

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
        cache.keys.flatten(0, 1).index_copy_(0, metadata.step.slot_mapping, key)
        return self._attend(query, None, value, cache, metadata, window, sinks)

    @override
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
        rotated = spec.head_dim - spec.latent
        attend_latent[len(launch.tiles), self._head_parts](
            *((out, None, None, query) if splits is None else (out, splits.parts, splits.weights, query)),
            *(cache.keys, launch.tiles, step.query_start_loc, step.seq_lens, step.block_tables),
            *(spec.scale, query.stride(0), step.block_tables.stride(0), cache.keys.stride(0)),
            HEADS=self._heads,
            TOKENS=launch.tokens,
            LATENT=spec.latent,
            ROTATED=rotated,
            PAGE=spec.block_size,
            BLOCK_M=size.rows,
            BLOCK_N=size.keys,
            BLOCK_D=padded(spec.latent),
            BLOCK_R=padded(rotated),
            SPLIT=splits is not None,
            num_warps=size.warps,
            num_stages=size.stages,
        )
