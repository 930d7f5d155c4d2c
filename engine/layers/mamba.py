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
from engine.layers.norm import GroupsNorm
from engine.layers.recurrent import CausalConv
from parallel.linear import MergedColumnParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import divide, even_pieces, kv_heads_per_rank


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Heads and their features, of all ranks.

    width: features of a head, each of which has a state of `depth` numbers. groups: heads of one group, which follow
    one another, are written and read alike.
    """

    heads: int
    groups: int
    width: int
    depth: int

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.width


class Mamba2(Layer):
    """A state of each head that decays and is added to at a rate of the token's (Mamba-2, arXiv 2405.21060).

    What is written, where, and from where it is read pass through a short convolution; what is read is gated, then
    normed by group. taps: of the convolution. time_limits: least and greatest rate. conv_bias, bias: whether the
    convolution, and the products at both ends, have one.

    Raises `CheckpointError` where heads cannot share groups, `ShardingError` where they cannot be split.
    """

    decay_log: ShardedParameter
    time_bias: ShardedParameter
    skip: ShardedParameter

    def __init__(
        self,
        hidden: int,
        sizes: MambaSizes,
        taps: int,
        eps: float,
        build: Build,
        *,
        time_limits: tuple[float, float],
        conv_bias: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        if sizes.heads % sizes.groups:
            raise CheckpointError(
                f"config.json: {sizes.heads} heads of Mamba are not a multiple of {sizes.groups} groups"
            )
        group, dtype = build.group, build.dtype
        self.sizes, self.time_limits = sizes, time_limits
        self.heads = divide(sizes.heads, group.size, "heads of Mamba")
        self.groups = kv_heads_per_rank(sizes.groups, group.size, "groups of Mamba")
        inner, shared = sizes.inner, sizes.groups * sizes.depth
        mixed, by = [inner, shared, shared], [sizes.heads, sizes.groups, sizes.groups]
        self.input = MergedColumnParallelLinear(
            hidden, [inner, *mixed, sizes.heads], bias, group, dtype, heads=[sizes.heads, *by, sizes.heads]
        )
        self.conv = CausalConv(mixed, taps, conv_bias, build, heads=by)
        pieces = even_pieces([sizes.heads], group.rank, group.size, "heads of Mamba")
        self.decay_log, self.time_bias, self.skip = (
            ShardedParameter.of((self.heads,), torch.float32, group.device, 0, pieces) for _ in range(3)
        )
        self.norm = GroupsNorm(inner, sizes.groups, eps, build)
        self.result = RowParallelLinear(inner, hidden, bias, group, dtype)

    @override
    def cache_spec(self, dtype: torch.dtype) -> RecurrentSpec:
        return RecurrentSpec(torch.float32, (self.conv.state, (self.heads, self.sizes.depth, self.sizes.width)))

    def forward(self, x: Tensor, rotations: Mapping[Layer, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        (taps, state), rows = context.state(self.cache_index)
        inner, shared = self.heads * self.sizes.width, self.groups * self.sizes.depth
        gate, mixed, time = self.input(x).split((inner, self.conv.size, self.heads), dim=1)
        value, key, query = self.conv(mixed, taps, rows, silu=True).split((inner, shared, shared), dim=1)
        key, query = (part.float().contiguous().unflatten(1, (self.groups, -1)) for part in (key, query))
        value = value.unflatten(1, (self.heads, -1))
        rate, decay = self._rates(time)
        read = self.kernels.outer_product_state(query, key, value, decay, rate, state, rows, delta=False)
        read = (read + value * self.skip.unsqueeze(1)).to(x.dtype)
        gated = self.kernels.silu_gate(torch.cat((gate, read.flatten(1)), dim=1))
        return self.result(self.norm(gated))

    def _rates(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much of a token is written, and by what each head's state is multiplied: [num_tokens, heads]."""
        # In fp64, as `sigmoid`: the bits of a number must not depend on its place.
        rate = F.softplus(time.double() + self.time_bias.double()).clamp(*self.time_limits)
        decay = torch.exp(-self.decay_log.double().exp() * rate)
        return rate.float().contiguous(), decay.float().contiguous()
