"""Linear layers with weights split over a tensor-parallel group, and the methods that hold and multiply a weight.

Activations are flat: [num_tokens, features].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from parallel.group import Group
from parallel.parameter import Recipe, ShardedParameter, replicated
from parallel.sharding import Piece, even_pieces, qkv_pieces


class LinearMethod(ABC):
    """How one linear layer holds its weight (plain, packed, quantised) and multiplies by it.

    `create` before the weights are loaded, `load` after, then `apply`. A method that is made of a weight that is
    there already needs neither of the first two.

    stored_names: what parameters of the layer are called in a checkpoint, where that is not as here.
    loads_plain: whether the plain weight is loaded first, so that as little as can be should be loaded before `load`.
    numbers: of the weight, in one element of the layer's `weight`.
    in_parameters: whether the layer's `weight`, `weight_scale`, `weight_zero` and `weight_global_scale`, where it has
    these, say all of it.
    """

    stored_names: Mapping[str, str] = {}
    loads_plain: bool = False
    numbers: ClassVar[int] = 1
    in_parameters: bool = True

    def create(self, layer: ParallelLinear, name: str) -> None:
        """Give `layer`, called `name`, the parameters that a checkpoint fills, if not those that it has."""
        return

    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        """Return how a parameter of the layer is made of other tensors of a checkpoint, None = it is read as it is.

        shape: of the parameter, or of one part of it, over all ranks.
        """
        return None

    def load(self, layer: ParallelLinear) -> None:
        """Make what `apply` needs of the layer's loaded parameters. All ranks must call alike, in one order."""
        return

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`; x is [num_tokens, in], the result [num_tokens, out] in x's dtype."""

    def describe(self) -> str:
        """Return a name that differs where rows are rounded otherwise: of the method, and of what it depends on."""
        return type(self).__name__

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept: on a GPU their memory is taken, and given back elsewhere, by sleep."""
        return (value for value in vars(self).values() if isinstance(value, Tensor))


class PlainLinear(LinearMethod):
    """The parameter as it was loaded, through `F.linear`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [out, in]

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class ParallelLinear(nn.Module):
    """Base of the linear layers: a weight of this rank's rows and columns, a bias, and the method that multiplies.

    `weight` is [out_per_rank, in_per_rank], empty where `method` holds all that is needed. Where it is quantised,
    `method` says which parameters there are instead or beside it: `weight_scale` [out_per_rank] at least.
    row_order: which loaded row goes to each place, None = its own.
    quantized: whether methods that quantise take this layer.
    """

    quantized: bool = True
    weight: ShardedParameter
    weight_scale: ShardedParameter
    weight_zero: ShardedParameter
    weight_global_scale: ShardedParameter
    bias: ShardedParameter | None

    def __init__(self, weight: ShardedParameter, bias: ShardedParameter | None, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group
        self.row_order: Sequence[int] | None = None
        self.method: LinearMethod = PlainLinear(weight)

    def order_rows(self) -> None:
        """Put the loaded rows into `row_order`; called once, before `method` makes what it needs of them."""
        if self.row_order is not None:
            names = ("weight", "weight_scale", "weight_zero", "weight_global_scale", "bias")
            for name, parameter in self.named_parameters(recurse=False):
                if name in names:
                    parameter.copy_(parameter[torch.tensor(self.row_order, device=parameter.device)])

    def use_weight(self, weight: ShardedParameter) -> None:
        """Multiply by another layer's parameter from now on (tied weights)."""
        self.weight = weight
        self.method = PlainLinear(weight)

    def release_weight(self, *others: nn.Parameter) -> None:
        """Free the weight, and others, whose contents `method` no longer needs; they cannot be loaded again."""
        for parameter in (self.weight, *others):
            parameter.data = parameter.data.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the product: [num_tokens, in] -> [num_tokens, out_per_rank]."""
        return self.method.apply(x, self.bias)


class ReplicatedLinear(ParallelLinear):
    """y = x W^T + b, whole on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: Group, dtype: torch.dtype) -> None:
        weight = replicated((out_features, in_features), dtype, group.device)
        super().__init__(weight, replicated((out_features,), dtype, group.device) if bias else None, group)


class MergedColumnParallelLinear(ParallelLinear):
    """Several projections of one input in one product (gate and up); parts are loaded by index.

    Each rank's output holds its share of every projection, one after another. heads: into how many each projection
    can be cut; ranks that outnumber them hold them alike. None = each feature is one, and none is held twice.

    Raises `ShardingError` when one of `out_features`, or of `heads`, does not divide by the group's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        group: Group,
        dtype: torch.dtype,
        heads: Sequence[int] | None = None,
    ) -> None:
        pieces = even_pieces(out_features, group.rank, group.size, "out_features", heads)
        super().__init__(*_column_parameters(in_features, pieces, bias, group, dtype), group)


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
        weight = ShardedParameter.of((out_features, pieces[0].size), dtype, group.device, 1, pieces)
        super().__init__(weight, replicated([out_features], dtype, group.device) if bias else None, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole product on every rank: [num_tokens, in_per_rank] -> [num_tokens, out]."""
        return self.group.all_reduce(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks: [num_tokens, in_per_rank] -> [num_tokens, out]."""
        # The sum would count the bias once per rank, so only rank 0 adds it.
        return self.method.apply(x, self.bias if self.group.rank == 0 else None)


def _column_parameters(
    in_features: int, pieces: tuple[Piece, ...], bias: bool, group: Group, dtype: torch.dtype
) -> tuple[ShardedParameter, ShardedParameter | None]:
    rows = sum(piece.size for piece in pieces)
    shapes = [(rows, in_features), (rows,)] if bias else [(rows, in_features)]
    made = [ShardedParameter.of(shape, dtype, group.device, 0, pieces) for shape in shapes]
    return made[0], made[1] if bias else None
