"""The interface of attention backends, and what they are told about a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What all layers of one model have in common, on this rank.

    windows: the distinct sliding windows of the layers (0 = none). softcap: see `DecoderSpec`; 0 = none.
    dtype: of queries, keys, values and cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int, ...]
    softcap: float
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of one step lie, on the host; see `StepInputs` for the meaning. All int32."""

    slot_mapping: Ints  # [num_tokens]
    query_start_loc: Ints  # [num_reqs + 1]
    seq_lens: Ints  # [num_reqs]
    num_computed_tokens: Ints  # [num_reqs]
    block_tables: Ints  # [num_reqs, max blocks]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step on the device, and its layout on the host.

    query_start_loc, seq_lens and block_tables are those of `layout`, for kernels that read them.
    """

    layout: StepLayout
    input_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int32
    slot_mapping: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32
    block_tables: Tensor  # [num_reqs, max blocks] int32
    logits_indices: Tensor  # [num_samples] int32


class AttentionBackend(ABC):
    """Stores the step's keys and values in the paged cache, then attends through the block tables.

    Made by `engine.attention.select`. A sequence's result does not depend on its company, rounding apart. Softmax
    is computed in fp32.
    """

    name: str
    # Whether slots of a block that no token was written to yet are read, under a mask that a NaN passes through.
    reads_unwritten: bool = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def prepare(self, step: StepTensors) -> Any:
        """Return whatever all layers of this step need; called once per step."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], metadata: Any, window: int
    ) -> Tensor:
        """Write `key` and `value` into the layer's `cache` and return the attention of `query`.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; rows may be
        strided. cache: (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]; a backend may lay the
        inside of a block out in another way. window: one of `spec.windows`.

        Returns [num_tokens, num_heads, head_dim], contiguous.
        """


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What the layers of one step need for attention: backend, its metadata and the cache of each layer."""

    backend: AttentionBackend
    metadata: Any
    layers: tuple[tuple[Tensor, Tensor], ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Attend in `layer`; shapes as in `AttentionBackend.forward`."""
        return self.backend.forward(query, key, value, self.layers[layer], self.metadata, window)
