"""What a layer keeps of the tokens that it has seen: in each block of the cache, or of each sequence a state.

Blocks are one pool with one space of ids for all layers, however unlike they are: a block has a part for each layer,
and one for the ids of its tokens.
So are the slots of states: those of running sequences, behind them snapshots, and one for steps without sequences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]
TOKEN_ID = torch.int32


@dataclass(frozen=True, slots=True)
class CacheSpec(ABC):
    """One layer's part of a block, on one rank. dtype: of what is kept."""

    dtype: torch.dtype

    @abstractmethod
    def shapes(self, block_size: int) -> tuple[Shape, ...]:
        """Return the shapes of the layer's tensors for one block of `block_size` tokens."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of the layer's part of a block."""
        return sum(map(math.prod, self.shapes(block_size))) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(CacheSpec):
    """Keys and values of all tokens, each [block_size, num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int

    def shapes(self, block_size: int) -> tuple[Shape, ...]:
        """Return the shape of the keys and that of the values."""
        return ((block_size, self.num_kv_heads, self.head_dim),) * 2


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of which a query sees the last `window` tokens, itself included."""

    window: int


@dataclass(frozen=True, slots=True)
class LatentSpec(CacheSpec):
    """One compressed vector a token, the key of all heads, [block_size, 1, width] (DeepSeek-V2's MLA).

    values: features of it, the first ones, that are the value. The vector is no head's, so that it is not split over
    the ranks of a group: each keeps all of it.
    """

    width: int
    values: int

    def shapes(self, block_size: int) -> tuple[Shape, ...]:
        """Return the one shape."""
        return ((block_size, 1, self.width),)


@dataclass(frozen=True, slots=True)
class RecurrentSpec(CacheSpec):
    """A sequence's state, of one size however many tokens it has (Mamba, linear attention, short convolutions).

    state: the shapes of its parts. Blocks hold nothing of it.
    """

    state: tuple[Shape, ...]

    def shapes(self, block_size: int) -> tuple[Shape, ...]:
        """Return no shape at all."""
        return ()

    @property
    def state_bytes(self) -> int:
        """The bytes of one state."""
        return sum(map(math.prod, self.state)) * self.dtype.itemsize


def block_bytes(specs: Iterable[CacheSpec], block_size: int) -> int:
    """Return the bytes of one block on one rank: the parts of all layers, and the ids of its tokens."""
    return sum(spec.block_bytes(block_size) for spec in specs) + block_size * TOKEN_ID.itemsize


def state_bytes(specs: Iterable[CacheSpec]) -> int:
    """Return the bytes of the recurrent state of one sequence on one rank: the parts of all layers."""
    return sum(spec.state_bytes for spec in specs if isinstance(spec, RecurrentSpec))
