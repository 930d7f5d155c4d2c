"""The paged key-value cache of one rank."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import LayerCache
from engine.config import EngineConfig
from engine.kv.room import gpu_budget


class KVCache:
    """Keys and values of all layers: one tensor [2, layers, blocks, block_size, kv_heads_per_rank, head_dim].

    Block 0 is the null block: padding reads it, nobody's tokens are in it. scales: see `LayerCache`, of all layers,
    [layers, 2, kv_heads_per_rank].
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Torch copies and fills bytes, not float8.
        held = torch.uint8 if dtype.itemsize == 1 else dtype
        self.tensor = torch.empty(shape, dtype=held, device=device)
        self.tensor[:, :, 0] = 0
        self._num_bytes = self.tensor.untyped_storage().nbytes()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: tuple[LayerCache, ...] = tuple(
            LayerCache(keys.view(dtype), values.view(dtype), None if scales is None else scales[layer])
            for layer, (keys, values) in enumerate(zip(*self.tensor, strict=True))
        )

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks in all layers: pairs is [num_copies, 2], (source, destination)."""
        if len(pairs):
            self.tensor[:, :, pairs[:, 1].long()] = self.tensor[:, :, pairs[:, 0].long()]

    def drop(self) -> None:
        """Give the memory back, contents and all; whoever holds views of it goes on holding them."""
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory that `drop` gave back."""
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.tensor[:, :, 0] = 0

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks, [num_blocks], in all layers."""
        self.tensor.index_fill_(2, blocks, 0)


def opened_blocks(slot_mapping: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Return the blocks whose first slot is written in this step, but not their last.

    What a former owner left in the rest of such a block is read under a mask, and a NaN would pass through it.
    """
    first = slot_mapping[slot_mapping % block_size == 0]
    full = np.isin(first + (block_size - 1), slot_mapping)
    blocks: NDArray[np.int64] = (first[~full] // block_size).astype(np.int64)
    return blocks


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block on one rank: keys and values of all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def cuda_budget(config: EngineConfig, device: torch.device, peak: int, current: int) -> int:
    """Return the bytes that the GPU can give after a warm-up run.

    peak, current: most and present bytes that torch had allocated. What others use counts as used.
    """
    free, total = torch.cuda.mem_get_info(device)
    return gpu_budget(config, total, free, peak, current)
