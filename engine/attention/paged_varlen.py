"""What attention by a kernel of ragged queries over a paged cache has in common, whichever library it is from."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionBackend, AttentionSpec, LayerCache, StepTensors

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step, and bounds of its queries' and sequences' lengths."""

    step: StepTensors
    max_query_len: int
    max_seq_len: int


class PagedVarlen(AttentionBackend):
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
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: PagedStep, window: int
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
