"""Attention by FlashAttention-3 (Dao), on Hopper GPUs; imported only when it is chosen.

Unlike the second version it takes pages of any size, and ragged queries over pages in the same call as decodes.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, LayerCache
from engine.attention.paged_varlen import PagedStep, PagedVarlen, installed, unfit_for_paged_varlen

MODULE = "flash_attn_interface"  # as flash-attention's folder `hopper` installs it
HOPPER = (9, 0)


def why_not_flash3(spec: AttentionSpec) -> str | None:
    """Return why FlashAttention-3 cannot serve this model here, None when it can."""
    reason = unfit_for_paged_varlen(spec)
    if reason is not None:
        return reason
    if not installed(MODULE):
        return f"the module {MODULE} is not installed"
    found = torch.cuda.get_device_capability(spec.device)
    return None if found == HOPPER else f"it is for GPUs of capability 9.0, this one has {found[0]}.{found[1]}"


class Flash3Attention(PagedVarlen):
    """One call of its key-value-cache kernel per layer, whatever is in the step."""

    name = "flash"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._kernels = importlib.import_module(MODULE)

    @override
    def _attend(self, query: Tensor, cache: LayerCache, paged: PagedStep, window: tuple[int, int]) -> Tensor:
        out: Tensor = self._kernels.flash_attn_with_kvcache(
            query,
            cache.keys,
            cache.values,
            cache_seqlens=paged.step.seq_lens,
            page_table=paged.step.block_tables,
            cu_seqlens_q=paged.step.query_start_loc,
            max_seqlen_q=paged.max_query_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=window,
            softcap=self.spec.softcap,
        )
        return out
