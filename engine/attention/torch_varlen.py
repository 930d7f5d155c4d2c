"""Attention by torch's own ragged kernel over a paged cache (`torch.nn.attention.varlen`, torch 2.12 and later).

Torch brings the interface; the kernels that read pages come with FlashAttention-3 on Hopper, or 4 on Blackwell, which
torch is told to use in this process.
"""

from __future__ import annotations

import importlib
import inspect

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, LayerCache
from engine.attention.paged_varlen import PagedStep, PagedVarlen, installed, unfit_for_paged_varlen

VARLEN = "torch.nn.attention.varlen"
# What reads pages on GPUs of a major capability: the name that torch has for it, and its module.
IMPLEMENTATIONS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}


def why_not_torch_varlen(spec: AttentionSpec) -> str | None:
    """Return why torch's ragged attention cannot serve this model here, None when it can."""
    reason = unfit_for_paged_varlen(spec)
    if reason is not None:
        return reason
    if spec.softcap:
        return "it has no softcap, which this model needs"
    if not reads_pages():
        return f"torch {torch.__version__} has no ragged attention over pages; it came with 2.12"
    found = torch.cuda.get_device_capability(spec.device)
    if found[0] not in IMPLEMENTATIONS:
        return f"its kernels are for GPUs of capability 9.0 and 10.0, this one has {found[0]}.{found[1]}"
    name, module = IMPLEMENTATIONS[found[0]]
    return None if installed(module) else f"{name} is not installed: there is no module {module}"


def reads_pages() -> bool:
    """Whether this torch's ragged attention takes block tables."""
    if not installed(VARLEN):
        return False
    function = importlib.import_module(VARLEN).varlen_attn
    return {"block_table", "seqused_k"} <= inspect.signature(function).parameters.keys()


class TorchVarlenAttention(PagedVarlen):
    """One call of `varlen_attn` per layer, whatever is in the step."""

    name = "torch_varlen"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        attention = importlib.import_module("torch.nn.attention")
        name, _ = IMPLEMENTATIONS[torch.cuda.get_device_capability(spec.device)[0]]
        if attention.current_flash_attention_impl() != name:
            attention.activate_flash_attention_impl(name)
        self._attention = importlib.import_module(VARLEN).varlen_attn

    @override
    def _attend(self, query: Tensor, cache: LayerCache, paged: PagedStep, window: tuple[int, int]) -> Tensor:
        out: Tensor = self._attention(
            query,
            cache.keys,
            cache.values,
            paged.step.query_start_loc,
            None,
            paged.max_query_len,
            paged.max_seq_len,
            scale=self.spec.scale,
            window_size=window,
            enable_gqa=self.spec.group > 1,
            seqused_k=paged.step.seq_lens,
            block_table=paged.step.block_tables,
        )
        return out
