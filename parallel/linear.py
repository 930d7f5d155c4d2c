"""Linear layers with weights split over a tensor-parallel group. Activations are flat: [num_tokens, features]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel.group import Group
from parallel.methods import LinearMethod, PlainLinear
from parallel.parameter import ShardedParameter, replicated
from parallel.sharding import Piece, even_pieces, qkv_pieces


class ParallelLinear(nn.Module):
    """Base of the linear layers: a weight of this rank's rows and columns, a bias, and the method that multiplies.

    `weight` is [out_per_rank, in_per_rank]; `choose_methods` empties it where `method` holds all that is needed.
    `weight_scale` [out_per_rank] is there where it is quantised (`parallel.quantise`).
    """

    weight: ShardedParameter
    weight_scale: ShardedParameter
    bias: ShardedParameter | None

    def __init__(self, weight: ShardedParameter, bias: ShardedParameter | None, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group
        self.method: LinearMethod = PlainLinear(weight)

    def use_weight(self, weight: ShardedParameter) -> None:
        """Multiply by another layer's parameter from now on (tied weights)."""
        self.weight = weight
        self.method = PlainLinear(weight)

    def release_weight(self) -> None:
        """Free the plain weight, whose contents `method` no longer needs; it cannot be loaded again."""
        self.weight.data = self.weight.data.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the product: [num_tokens, in] -> [num_tokens, out_per_rank]."""
        return self.method.apply(x, self.bias)


class MergedColumnParallelLinear(ParallelLinear):
    """Several projections of one input in one product (gate and up); parts are loaded by index.

    Each rank's output holds its share of every projection, one after another: `output_sizes`.

    Raises `ShardingError` when one of `out_features` does not divide by the group's size.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], bias: bool, group: Group, dtype: torch.dtype
    ) -> None:
        pieces = even_pieces(out_features, group.rank, group.size, "out_features")
        super().__init__(*_column_parameters(in_features, pieces, bias, group, dtype), group)
        self.output_sizes = [piece.size for piece in pieces]


class ColumnParallelLinear(MergedColumnParallelLinear):
    """y = x W^T with the rows of W (the outputs) split: each rank returns its share of the features.

    Raises `ShardingError` when `out_features` does not divide by the group's size.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, group: Group, dtype: torch.dtype) -> None:
        super().__init__(in_features, [out_features], bias, group, dtype)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections in one product, split by heads; parts "q", "k", "v" or all three fused.

    num_heads, num_kv_heads: heads of this rank (KV heads are replicated where ranks outnumber them).
    q_size, kv_size: this rank's output is q | k | v of q_size, kv_size and kv_size features.

    Raises `ShardingError` when the heads cannot be split.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        pieces = qkv_pieces(num_heads, num_kv_heads, head_dim, group.rank, group.size)
        super().__init__(*_column_parameters(hidden_size, pieces, bias, group, dtype), group)
        self.q_size, self.kv_size = pieces[0].size, pieces[1].size
        self.num_heads, self.num_kv_heads = self.q_size // head_dim, self.kv_size // head_dim


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the columns of W (the inputs) split: x is this rank's share, y is whole on every rank.

    Raises `ShardingError` when `in_features` does not divide by the group's size.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, group: Group, dtype: torch.dtype) -> None:
        pieces = even_pieces([in_features], group.rank, group.size, "in_features")
        shard = torch.zeros(out_features, pieces[0].size, dtype=dtype, device=group.device)
        whole_bias = replicated([out_features], dtype, group.device) if bias else None
        super().__init__(ShardedParameter(shard, 1, pieces), whole_bias, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole product on every rank: [num_tokens, in_per_rank] -> [num_tokens, out]."""
        # The sum over the ranks would count the bias once per rank, so only rank 0 adds it.
        return self.group.all_reduce(self.method.apply(x, self.bias if self.group.rank == 0 else None))


def _column_parameters(
    in_features: int, pieces: tuple[Piece, ...], bias: bool, group: Group, dtype: torch.dtype
) -> tuple[ShardedParameter, ShardedParameter | None]:
    rows = sum(piece.size for piece in pieces)
    weight = torch.zeros(rows, in_features, dtype=dtype, device=group.device)
    offsets = torch.zeros(rows, dtype=dtype, device=group.device) if bias else None
    return ShardedParameter(weight, 0, pieces), None if offsets is None else ShardedParameter(offsets, 0, pieces)
