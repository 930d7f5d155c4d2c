"""Libraries' attention for ragged queries over a paged cache: FlashAttention 2 and 3 (Dao), and torch's own.

flash-attn is imported only when it is chosen. FlashAttention-3, on Hopper GPUs, takes pages of any size, unlike the
second version, and ragged queries over pages in the same call as decodes. Torch (2.12 and later) brings an
interface; the kernels that read pages come with FlashAttention-3 on Hopper, or 4 on Blackwell, which torch is set
to use in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionSpec, LayerCache, PagedAttention, StepTensors

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step, and bounds of its queries' and sequences' lengths."""

    step: StepTensors
    max_query_len: int
    max_seq_len: int


class PagedVarlen(PagedAttention):
    """Stores new keys and values, then reads all of them through the block tables in one call."""

    supports_graphs = True

    @override
    def prepare(self, step: StepTensors) -> PagedStep:
        layout = step.layout
        lengths = layout.query_start_loc[1:] - layout.query_start_loc[:-1]
        return PagedStep(step, int(lengths.max(initial=0)), int(layout.seq_lens.max(initial=0)))

    @override
    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> PagedStep:
        return PagedStep(step, 1, max_seq_len)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: PagedStep,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        for store, new in ((cache.keys, key), (cache.values, value)):
            store.flatten(0, 1).index_copy_(0, metadata.step.slot_mapping, new)
        return self._attend(query, cache, metadata, (window - 1, 0) if window else (-1, 0))

    @abstractmethod
    def _attend(self, query: Tensor, cache: LayerCache, paged: PagedStep, window: tuple[int, int]) -> Tensor:
        """Return the attention of `query`, causal from the end. window: keys to either side, -1 = all."""


def unfit_for_paged_varlen(spec: AttentionSpec) -> str | None:
    """Return why these kernels serve no such model on any GPU, None when they do."""
    if spec.device.type != "cuda":
        return "it needs a CUDA device"
    if spec.batch_invariant:
        return "how it splits work depends on the batch; with batch_invariant use attention_backend=triton"
    if spec.fp8_cache:
        return "it reads no fp8 cache with queries of another dtype; use attention_backend=triton"
    if spec.dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, not {str(spec.dtype).removeprefix('torch.')}; set dtype=bfloat16"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def installed(module: str) -> bool:
    """Whether `module` can be imported; nothing of it is, but packages that it lies in."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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


class FlashAttention(PagedAttention):
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
        sinks: Tensor | None = None,
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
