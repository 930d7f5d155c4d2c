"""The interface of attention backends, what they get of a step, and several of them for unlike layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from engine.kernels.recurrent import StateRows

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What layers ask of attention that differ in their windows alone, on this rank.

    windows: the distinct sliding windows of the layers (0 = none). softcap: c in c * tanh(score / c); 0 = none.
    sinks: whether each head has a score that takes its share of the softmax and adds nothing (gpt-oss).
    latent: features of a key, its first ones, that are its value (DeepSeek-V2's MLA), with one KV head; 0 = values
    are vectors of their own, as wide as keys.
    dtype: of queries, keys and values, and of the cache unless `fp8_cache`, which holds float8_e4m3fn.
    batch_invariant: the bits of a token's result must not depend on what else is in its step.
    chunk: a token sees those of its own chunk of so many tokens, a multiple of block_size (Llama 4); 0 = all.
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
    fp8_cache: bool = False
    batch_invariant: bool = False
    sinks: bool = False
    chunk: int = 0
    latent: int = 0

    @property
    def value_dim(self) -> int:
        """Features of a value, and of what attention gives each head."""
        return self.latent or self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_dtype(self) -> torch.dtype:
        """What the cache holds."""
        return torch.float8_e4m3fn if self.fp8_cache else self.dtype


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the paged cache.

    keys, values: [num_blocks, block_size, num_kv_heads, head_dim]; a backend may lay the inside of a block out in
    another way. With `AttentionSpec.latent` values are a view of the keys. scales: [2, num_kv_heads] fp32, by which
    what an fp8 cache holds of keys and of values is multiplied; None where the cache holds the model's dtype.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MergedHeads:
    """A layer's product of queries, keys and values, and what queries and keys go through before attention.

    heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; with `AttentionSpec.latent`
    [num_tokens, num_heads + 1, head_dim]: queries and the key that has the value, normed and rotated already. norms:
    a weight for each head of queries and keys, [num_heads + num_kv_heads, head_dim], None = no norms. rotation: None
    = not rotated; for a backend that `rotates` the step's cosines and sines, [num_tokens, 2, head_dim / 2] fp32, else
    what `norm_rotate` takes. norm_rotate: of `engine.kernels.base.Kernels`. sinks: a score for each query head,
    [num_heads] fp32, None where `AttentionSpec.sinks` is False.
    """

    heads: Tensor
    norms: Tensor | None
    rotation: Any
    eps: float
    norm_rotate: Callable[[Tensor, Tensor | None, Any, float], Tensor]
    sinks: Tensor | None = None


class StepLayout(Protocol):
    """Where the tokens of one step lie, on the host: what a backend reads of a `StepInputs`. All int32."""

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

    Made by `engine.attention.select`: a `PagedAttention` where all layers ask for the same, else `UnlikeLayers`. A
    sequence's result does not depend on its company, rounding apart. Softmax is computed in fp32.
    """

    name: str
    # Whether slots of a block that no token was written to yet are read, under a mask that a NaN passes through.
    reads_unwritten: bool = True
    # Whether `forward_merged` norms and rotates by itself, from plain cosines and sines.
    rotates: bool = False
    # Whether decode steps can be recorded in a CUDA graph; see `decode_metadata`.
    supports_graphs: bool = False
    # Whether small mixed steps can be, too; see `mixed_metadata`.
    supports_mixed_graphs: bool = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def prepare(self, step: StepTensors) -> Any:
        """Return whatever all layers of this step need; called once per step."""

    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> Any:
        """Return metadata of a decode step, for a graph that holds this call as well as what is done with it.

        It stays true while the step's tensors are refilled in place before each replay.

        step: one token per row, `query_start_loc` counting 0, 1, 2, ...; its `layout` is not looked at. Rows of
        padding have a seq_len of 0, write to the null block and get zeros. max_seq_len: no row will ever be longer.

        Raises `NotImplementedError` where `supports_graphs` is False.
        """
        raise NotImplementedError(f"attention backend {self.name} cannot be recorded in a CUDA graph")

    def mixed_plan_size(self, tokens: int, rows: int) -> int:
        """Return the int32 of `mixed_plan`."""
        raise NotImplementedError(f"attention backend {self.name} records no mixed steps")

    def mixed_plan(self, layout: StepLayout, tokens: int, rows: int) -> Ints | None:
        """Return what `mixed_metadata` needs of a step that is padded to so many tokens and rows; on the host.

        None where there is no room for it: the step is run as it is. All ranks must come to the same.
        """
        raise NotImplementedError(f"attention backend {self.name} records no mixed steps")

    def mixed_metadata(self, step: StepTensors, plan: Tensor, max_seq_len: int) -> Any:
        """Return metadata of a step of any rows, for a graph that holds this call as well as what is done with it.

        It stays true while `plan`, all zeros or from `mixed_plan`, and the step's tensors are refilled in place
        before each replay. step: its last row is padding, without a query and without a length, as may be others
        before it; tokens that belong to no row may get anything. Its `layout` is not looked at. max_seq_len: no row
        will ever be longer.

        Raises `NotImplementedError` where `supports_mixed_graphs` is False.
        """
        raise NotImplementedError(f"attention backend {self.name} records no mixed steps")

    @abstractmethod
    def attend(self, layer: int, merged: MergedHeads, cache: LayerCache, metadata: Any, window: int) -> Tensor:
        """Norm and rotate queries and keys, store keys and values in `cache`, and return the attention.

        layer: its number among those that have a cache. `merged.heads` may be overwritten. window: one of
        `spec.windows`.

        Returns [num_tokens, num_heads, value_dim], contiguous.
        """


class PagedAttention(AttentionBackend):
    """One way to attend for all layers that ask for the same, but for their windows."""

    @abstractmethod
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
        """Write `key` and `value` into the layer's `cache` and return the attention of `query`.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], with `spec.latent`
        value is a view of the key; rows may be strided. window: one of `spec.windows`. sinks: as of `MergedHeads`.

        Returns [num_tokens, num_heads, value_dim], contiguous.
        """

    def forward_merged(self, merged: MergedHeads, cache: LayerCache, metadata: Any, window: int) -> Tensor:
        """Norm and rotate queries and keys, then do as `forward`; `merged.heads` may be overwritten."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        if self.spec.latent:
            query, key = merged.heads.split((heads, kv_heads), dim=1)
            return self.forward(query, key, key[..., : self.spec.latent], cache, metadata, window)
        # Queries and keys lie side by side in the merged product, so that they are normed and rotated together.
        query_key, value = merged.heads.split((heads + kv_heads, kv_heads), dim=1)
        if merged.norms is not None or merged.rotation is not None:
            query_key = merged.norm_rotate(query_key, merged.norms, merged.rotation, merged.eps)
        query, key = query_key.split((heads, kv_heads), dim=1)
        return self.forward(query, key, value, cache, metadata, window, merged.sinks)

    @override
    def attend(self, layer: int, merged: MergedHeads, cache: LayerCache, metadata: Any, window: int) -> Tensor:
        return self.forward_merged(merged, cache, metadata, window)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What the layers of one step need for attention: backend, its metadata and the cache of each layer that has one.

    layers: `LayerCache` of those that attend, the tensors that they ask for of others. rows: for layers with a
    recurrent state; None where the model has none.
    """

    backend: AttentionBackend
    metadata: Any
    layers: tuple[Any, ...]
    rows: StateRows | None = None

    def attend(self, layer: int, merged: MergedHeads, window: int) -> Tensor:
        """Attend in `layer`, by its number among those that have a cache; see `AttentionBackend.attend`."""
        return self.backend.attend(layer, merged, self.layers[layer], self.metadata, window)

    def state(self, layer: int) -> tuple[tuple[Tensor, ...], StateRows]:
        """Return the tensors of recurrent states that `layer` has, [slots, ...] each, and where the step's are.

        layer: its number among those that have a cache. Raises `ValueError` for a step without states.
        """
        if self.rows is None:
            raise ValueError("a layer with a recurrent state is run in a step that says nothing of states")
        return self.layers[layer], self.rows


def cut(layout: StepLayout, size: int) -> Ints:
    """Return the tiles of a step, [num_tiles, 3]: row in the tables, first query, queries (at most `size`)."""
    lengths = np.diff(layout.query_start_loc)
    parts = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths)), parts)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
    count = np.minimum(lengths[sequence] - offset, size)
    return np.stack((sequence, offset, count), axis=1).astype(np.int32)


class UnlikeLayers(AttentionBackend):
    """A backend for each kind of layer, all of one name. Its metadata is a tuple, one for each.

    kinds: for each layer with a cache, the number of its backend. `spec` is the first one's: what all have in common
    may be read from it.
    """

    def __init__(self, backends: Sequence[PagedAttention], kinds: Sequence[int]) -> None:
        super().__init__(backends[0].spec)
        self._backends = tuple(backends)
        self._kinds = tuple(kinds)
        self.name = backends[0].name
        self.rotates = all(each.rotates for each in backends)
        self.reads_unwritten = any(each.reads_unwritten for each in backends)
        self.supports_graphs = all(each.supports_graphs for each in backends)
        self.supports_mixed_graphs = all(each.supports_mixed_graphs for each in backends)

    @override
    def prepare(self, step: StepTensors) -> tuple[Any, ...]:
        return tuple(each.prepare(step) for each in self._backends)

    @override
    def decode_metadata(self, step: StepTensors, max_seq_len: int) -> tuple[Any, ...]:
        return tuple(each.decode_metadata(step, max_seq_len) for each in self._backends)

    @override
    def mixed_plan_size(self, tokens: int, rows: int) -> int:
        return sum(each.mixed_plan_size(tokens, rows) for each in self._backends)

    @override
    def mixed_plan(self, layout: StepLayout, tokens: int, rows: int) -> Ints | None:
        plans = [plan for each in self._backends if (plan := each.mixed_plan(layout, tokens, rows)) is not None]
        return np.concatenate(plans) if len(plans) == len(self._backends) else None

    @override
    def mixed_metadata(self, step: StepTensors, plan: Tensor, max_seq_len: int) -> tuple[Any, ...]:
        sizes = [each.mixed_plan_size(len(step.input_ids), len(step.seq_lens)) for each in self._backends]
        plans = zip(self._backends, plan.split(sizes), strict=True)
        return tuple(each.mixed_metadata(step, own, max_seq_len) for each, own in plans)

    @override
    def attend(self, layer: int, merged: MergedHeads, cache: LayerCache, metadata: Any, window: int) -> Tensor:
        kind = self._kinds[layer]
        return self._backends[kind].forward_merged(merged, cache, metadata[kind], window)
