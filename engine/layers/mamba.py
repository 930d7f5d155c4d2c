"""The mixer of Mamba-2; this rank's share of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError
from engine.kv.cache_specs import RecurrentSpec
from engine.layers.base import Build, Layer
from engine.layers.recurrent import CausalConv
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import Piece, divide, even_pieces, kv_head_start, kv_heads_per_rank


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Heads and their features, of all ranks.

    heads share groups in order, as query heads share those of keys. width: features of a head. depth: of its state,
    which is [depth, width].
    """

    heads: int
    groups: int
    width: int
    depth: int

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.width
