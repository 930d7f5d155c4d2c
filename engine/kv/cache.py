"""The paged key-value cache of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import LayerCache
from engine.config import EngineConfig
from engine.kv.cache_size import gpu_budget
from engine.kv.cache_specs import CacheSpec, FullAttentionSpec


class KVCache:
    """What all layers keep of the tokens in each block, of whatever shapes.

    tensors: one for each shape and dtype that a layer has, [number of those, num_blocks, *shape], as bytes where
    torch can copy and fill none of the dtype. Block 0 is the null block: padding reads it, and it holds no tokens.
    layers: a `LayerCache` for each layer of keys and values, for others their tensors, [num_blocks, *shape].
    scales: of each layer, see `LayerCache`.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Sequence[Tensor | None] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        counts = Counter((shape, spec.dtype) for spec in specs for shape in spec.shapes(block_size))
        made = {
            (shape, dtype): torch.empty(count, num_blocks, *shape, dtype=_held(dtype), device=device)
            for (shape, dtype), count in counts.items()
        }
        self.tensors = tuple(made.values())
        self._num_bytes = [tensor.untyped_storage().nbytes() for tensor in self.tensors]
        self.clear(torch.zeros(1, dtype=torch.int64, device=device))
        left = {key: iter(tensor.view(key[1])) for key, tensor in made.items()}
        self.layers = tuple(
            _layer(spec, [next(left[shape, spec.dtype]) for shape in spec.shapes(block_size)], scale)
            for spec, scale in zip_longest(specs, scales)
        )

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks in all layers: pairs is [num_copies, 2], (source, destination)."""
        if len(pairs):
            source, destination = pairs.long().unbind(1)
            for tensor in self.tensors:
                tensor[:, destination] = tensor[:, source]

    def drop(self) -> None:
        """Give the memory back, contents and all; views of it stay, and are empty until `restore`."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory that `drop` gave back."""
        for tensor, size in zip(self.tensors, self._num_bytes, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor[:, 0] = 0

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks, [num_blocks], in all layers."""
        for tensor in self.tensors:
            tensor.index_fill_(1, blocks, 0)


def _held(dtype: torch.dtype) -> torch.dtype:
    """Return what torch copies and fills in the place of `dtype`: bytes, not float8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _layer(spec: CacheSpec, tensors: list[Tensor], scales: Tensor | None) -> LayerCache | tuple[Tensor, ...]:
    if not isinstance(spec, FullAttentionSpec):
        return tuple(tensors)
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
