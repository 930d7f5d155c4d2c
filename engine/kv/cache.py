"""The paged key-value cache of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import LayerCache
from engine.config import EngineConfig
from engine.kv.cache_size import gpu_budget
from engine.kv.cache_specs import TOKEN_ID, CacheSpec, FullAttentionSpec, LatentSpec, RecurrentSpec, Shape


class KVCache:
    """What all layers keep of the tokens in each block, of whatever shapes.

    tensors: one for each shape and dtype that a layer has, [number of those, num_blocks, *shape], as bytes where
    torch can copy and fill none of the dtype. Block 0 is the null block: padding reads it, and it holds no tokens.
    states: one for each shape and dtype of recurrent states, [number of those, num_states, *shape]: slots of running
    sequences, of snapshots, and a last one for steps without sequences. What is in a slot that nothing was written to
    is never read.
    token_ids: [num_blocks, block_size] int32, whose keys and values are in each place: copied with them.
    layers: a `LayerCache` for each layer of keys and values, for others their tensors, [num_blocks, *shape] or
    [num_states, *shape].
    scales: of each layer, see `LayerCache`.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Sequence[Tensor | None] = (),
        num_states: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_states = num_states
        blocks, states = _Parts(), _Parts()
        for spec in specs:
            blocks.count(spec.shapes(block_size), spec.dtype)
            if isinstance(spec, RecurrentSpec):
                states.count(spec.state, spec.dtype)
        blocks.count([(block_size,)], TOKEN_ID)
        self.tensors = blocks.allocate(num_blocks, device)
        self.states = states.allocate(num_states, device)
        self._num_bytes = [tensor.untyped_storage().nbytes() for tensor in (*self.tensors, *self.states)]
        self.clear(torch.zeros(1, dtype=torch.int64, device=device))
        self.layers = tuple(
            states.next(spec.state, spec.dtype)
            if isinstance(spec, RecurrentSpec)
            else _layer(spec, blocks.next(spec.shapes(block_size), spec.dtype), scale)
            for spec, scale in zip_longest(specs, scales)
        )
        (self.token_ids,) = blocks.next([(block_size,)], TOKEN_ID)

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks in all layers: pairs is [num_copies, 2], (source, destination)."""
        if len(pairs):
            source, destination = pairs.long().unbind(1)
            for tensor in self.tensors:
                tensor[:, destination] = tensor[:, source]

    def copy_states(self, pairs: Tensor) -> None:
        """Copy recurrent states in all layers: pairs is [num_copies, 2], (source, target); no target is a source."""
        if len(pairs):
            source, target = pairs.long().unbind(1)
            for tensor in self.states:
                tensor[:, target] = tensor[:, source]

    def drop(self) -> None:
        """Give the memory back, contents and all; views of it stay, and are empty until `restore`."""
        for tensor in (*self.tensors, *self.states):
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory that `drop` gave back."""
        for tensor, size in zip((*self.tensors, *self.states), self._num_bytes, strict=True):
            tensor.untyped_storage().resize_(size)
        for tensor in self.tensors:
            tensor[:, 0] = 0

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks, [num_blocks], in all layers."""
        for tensor in self.tensors:
            tensor.index_fill_(1, blocks, 0)


class _Parts:
    """Tensors of layers, those of one shape and dtype in one tensor."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Shape, torch.dtype]] = Counter()
        self._left: dict[tuple[Shape, torch.dtype], Iterator[Tensor]] = {}

    def count(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        """Note that a layer has these."""
        self._counts.update((shape, dtype) for shape in shapes)

    def allocate(self, places: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return all tensors, each [number of those, places, *shape]; `next` hands their parts out."""
        made = {
            (shape, dtype): torch.empty(count, places, *shape, dtype=_held(dtype), device=device)
            for (shape, dtype), count in self._counts.items()
        }
        self._left = {key: iter(tensor.view(key[1])) for key, tensor in made.items()}
        return tuple(made.values())

    def next(self, shapes: Sequence[Shape], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the tensors of the next layer with these, each [places, *shape]."""
        return tuple(next(self._left[shape, dtype]) for shape in shapes)


def _held(dtype: torch.dtype) -> torch.dtype:
    """Return what torch copies and fills in the place of `dtype`: bytes, not float8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _layer(spec: CacheSpec, tensors: tuple[Tensor, ...], scales: Tensor | None) -> LayerCache | tuple[Tensor, ...]:
    if isinstance(spec, LatentSpec):
        (latent,) = tensors
        return LayerCache(latent, latent[..., : spec.values], scales)
    if not isinstance(spec, FullAttentionSpec):
        return tensors
    keys, values = tensors
    return LayerCache(keys, values, scales)


def opened_blocks(slot_mapping: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Return the blocks whose first slot is written in this step, but not their last.

    What a former owner left in the rest of such a block is read under a mask, and a NaN would pass through it.
    """
    first = slot_mapping[slot_mapping % block_size == 0]
    full = np.isin(first + (block_size - 1), slot_mapping)
    blocks: NDArray[np.int64] = (first[~full] // block_size).astype(np.int64)
    return blocks


def cuda_budget(config: EngineConfig, device: torch.device, peak: int, current: int) -> int:
    """Return the bytes that the GPU can give after a warm-up run.

    peak, current: most and present bytes that torch had allocated. What others use counts as used.
    """
    free, total = torch.cuda.mem_get_info(device)
    return gpu_budget(config, total, free, peak, current)
