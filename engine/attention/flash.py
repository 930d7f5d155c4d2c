"""Attention by the flash-attn package (Dao), on CUDA; imported only when it is chosen."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionBackend, AttentionSpec, LayerCache, StepTensors
from engine.attention.paged_varlen import DTYPES, MAX_HEAD_DIM, unfit_for_paged_varlen

PAGE_MULTIPLE = 256  # flash-attn 2 reads pages of multiples of this many tokens


def why_not_flash(spec: AttentionSpec) -> str | None:
    """Return why flash-attn cannot serve this model here, None when it can."""
    reason = unfit_for_paged_varlen(spec)
    if reason is not None:
        return reason
    unfit = unfit_for_flash(spec)
    if unfit is None and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return unfit


def unfit_for_flash(spec: AttentionSpec) -> str | None:
    """Return why flash-attn serves no such model on any GPU, None when it does."""
    if spec.batch_invariant:
        return "how it splits work depends on the batch; with batch_invariant use attention_backend=triton"
    if spec.fp8_cache:
        return "it keeps keys and values in the dtype of the model"
    if spec.dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, not {str(spec.dtype).removeprefix('torch.')}; set dtype=bfloat16"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if spec.block_size % PAGE_MULTIPLE:
        return f"its pages are multiples of {PAGE_MULTIPLE} tokens; set block_size to {PAGE_MULTIPLE}"
    return None


@dataclass(frozen=True, slots=True)
class _Metadata:
    step: StepTensors
    max_query_len: int
    max_seq_len: int
    key_start_loc: Tensor  # [num_reqs + 1] int32, prefix sums of the sequence lengths
    fresh: bool  # all keys are among the step's own


class FlashAttention(AttentionBackend):
    """Variable-length attention for prefill and mixed steps, the key-value-cache kernel where all are decoding."""

    name = "flash"
    supports_graphs = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._kernels = importlib.import_module("flash_attn")

    @override
    def prepare(self, step: StepTensors) -> _Metadata:
        layout = step.layout
        starts = np.zeros(len(layout.seq_lens) + 1, np.int32)
        np.cumsum(layout.seq_lens, out=starts[1:])
        return _Metadata(
            step,
            int(np.diff(layout.query_start_loc).max(initial=0)),
            int(layout.seq_lens.max(initial=0)),
            torch.from_numpy(starts).to(self.spec.device, non_blocking=True),
            not layout.num_computed_tokens.any(),
        )

    @override
    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> _Metadata:
        return _Metadata(step, 1, max_seq_len, step.query_start_loc, fresh=False)

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
            store.flatten(0, 1).index_copy_(0, metadata.step.slot_mapping, new)
        common = {
            "softmax_scale": self.spec.scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "softcap": self.spec.softcap,
        }
        if metadata.max_query_len == 1:
            return self._decode(query, cache, metadata.step, common)
        return self._prefill(query, (key, value) if metadata.fresh else (cache.keys, cache.values), metadata, common)

    def _decode(self, query: Tensor, cache: LayerCache, step: StepTensors, common: dict[str, object]) -> Tensor:
        out: Tensor = self._kernels.flash_attn_with_kvcache(
            query.unsqueeze(1),
            cache.keys,
            cache.values,
            cache_seqlens=step.seq_lens,
            block_table=step.block_tables,
            **common,
        )
        return out.squeeze(1)

    def _prefill(
        self, query: Tensor, keys_values: tuple[Tensor, Tensor], metadata: _Metadata, common: dict[str, object]
    ) -> Tensor:
        step = metadata.step
        out: Tensor = self._kernels.flash_attn_varlen_func(
            query,
            *keys_values,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=metadata.key_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            block_table=None if metadata.fresh else step.block_tables,
            **common,
        )
        return out
