"""Layers that keep a recurrent state instead of keys and values; this rank's share of their channels and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError
from engine.kernels.recurrent import StateRows
from engine.kv.cache_specs import RecurrentSpec
from engine.layers.base import Build, Layer
from engine.layers.mlp import sigmoid
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from parallel.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import divide, even_pieces

MOST_TAPS = 8  # of a convolution; more than any known model has


class CausalConv(Layer):
    """A causal convolution of each channel by itself, a torch `Conv1d` in the checkpoint.

    sizes: channels of each part, which are split over the ranks part by part. taps: tokens that it sees. heads: as of
    `MergedColumnParallelLinear`.

    Raises `CheckpointError` for taps that are not implemented, `ShardingError` where channels do not divide.
    """

    weight: ShardedParameter
    bias: ShardedParameter | None

    def __init__(
        self, sizes: Sequence[int], taps: int, bias: bool, build: Build, heads: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if not 2 <= taps <= MOST_TAPS:
            raise CheckpointError(
                f"config.json: a convolution over {taps} tokens is not supported; 2 to {MOST_TAPS} are"
            )
        group = build.group
        pieces = even_pieces(sizes, group.rank, group.size, "channels", heads)
        self.size, self.taps = sum(piece.size for piece in pieces), taps
        self.weight = ShardedParameter.of((self.size, 1, taps), build.dtype, group.device, 0, pieces)
        self.bias = ShardedParameter.of((self.size,), build.dtype, group.device, 0, pieces) if bias else None
        self.by_tap: Tensor | None = None  # [taps, size] fp32
        self.offset: Tensor | None = None  # [size] fp32

    @property
    def state(self) -> tuple[int, int]:
        """The shape of its state: the inputs of the last tokens."""
        return self.taps - 1, self.size

    @override
    def finish_loading(self) -> None:
        self.by_tap = self.weight.squeeze(1).t().float().contiguous()
        self.offset = None if self.bias is None else self.bias.data.float().clone()

    def forward(self, x: Tensor, state: Tensor, rows: StateRows, silu: bool) -> Tensor:
        """[num_tokens, size] -> [num_tokens, size]. state: [slots, *self.state] fp32, updated."""
        weight = self.weight.squeeze(1).t() if self.by_tap is None else self.by_tap
        return self.kernels.short_conv(x, weight, self.offset, state, rows, silu)


class ShortConvolution(Layer):
    """result(C * conv(B * x)), B, C and x of one product of the input (LFM2).

    hidden: width, and number of channels. taps: tokens that the convolution sees.
    """

    def __init__(self, hidden: int, taps: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.input = MergedColumnParallelLinear(hidden, [hidden] * 3, bias, build.group, build.dtype)
        self.conv = CausalConv([hidden], taps, bias, build)
        self.result = RowParallelLinear(hidden, hidden, bias, build.group, build.dtype)

    @override
    def cache_spec(self, dtype: torch.dtype) -> RecurrentSpec:
        return RecurrentSpec(torch.float32, (self.conv.state,))

    def forward(self, x: Tensor, rotations: Mapping[Rotary, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        (state,), rows = context.state(self.cache_index)
        before, after, x = self.input(x).chunk(3, dim=-1)
        return self.result(self.conv(before * x, state, rows, silu=False).mul_(after))


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads and their features, of all ranks. Heads of values share those of queries and keys in order."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def shared(self) -> int:
        """Heads of values for each one of keys."""
        return self.value_heads // self.key_heads


class GatedDeltaNet(Layer):
    """A state of each head that keys write to and queries read ("Gated Delta Networks", arXiv 2412.06464).

    Queries, keys and values pass through a short convolution; what is read is normed and gated. taps: of the
    convolution. by_head: whether a checkpoint holds all that belongs to a head of keys together, its query, key,
    values and gates (Qwen3-Next), or else each of these for all heads, the gates in a product of their own.

    Raises `CheckpointError` where heads cannot share, `ShardingError` where they cannot be split.
    """

    decay_log: ShardedParameter
    time_bias: ShardedParameter

    def __init__(self, hidden: int, sizes: DeltaSizes, taps: int, eps: float, build: Build, *, by_head: bool) -> None:
        super().__init__()
        if sizes.value_heads % sizes.key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads = {sizes.value_heads} is not a multiple of "
                f"linear_num_key_heads = {sizes.key_heads}"
            )
        group, dtype = build.group, build.dtype
        self.groups = divide(sizes.key_heads, group.size, "linear_num_key_heads")
        self.heads, self.sizes = self.groups * sizes.shared, sizes
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.input: MergedColumnParallelLinear
        self.gate: ColumnParallelLinear | None = None
        self.rates: MergedColumnParallelLinear
        if by_head:
            self.input = ColumnParallelLinear(hidden, 2 * (keys + values), False, group, dtype)
            self.input.row_order = self._by_kind([sizes.key_dim] * 2 + [sizes.shared * sizes.value_dim] * 2)
            self.rates = ColumnParallelLinear(hidden, 2 * sizes.value_heads, False, group, dtype)
            self.rates.row_order = self._by_kind([sizes.shared] * 2)
        else:
            self.input = MergedColumnParallelLinear(hidden, [keys, keys, values], False, group, dtype)
            self.gate = ColumnParallelLinear(hidden, values, False, group, dtype)
            self.rates = MergedColumnParallelLinear(hidden, [sizes.value_heads] * 2, False, group, dtype)
        self.conv = CausalConv([keys, keys, values], taps, False, build)
        pieces = even_pieces([sizes.value_heads], group.rank, group.size, "linear_num_value_heads")
        self.decay_log, self.time_bias = (
            ShardedParameter.of((self.heads,), torch.float32, group.device, 0, pieces) for _ in range(2)
        )
        self.norm = RMSNorm(sizes.value_dim, eps, build)
        self.result = RowParallelLinear(values, hidden, False, group, dtype)

    def _by_kind(self, widths: Sequence[int]) -> list[int]:
        """Return the order of rows that lie by heads of keys, `widths` for each, in which they lie kind by kind."""
        together = sum(widths)
        firsts = [sum(widths[:kind]) for kind in range(len(widths))]
        return [
            head * together + first + row
            for first, width in zip(firsts, widths, strict=True)
            for head in range(self.groups)
            for row in range(width)
        ]

    @override
    def cache_spec(self, dtype: torch.dtype) -> RecurrentSpec:
        shape = (self.heads, self.sizes.key_dim, self.sizes.value_dim)
        return RecurrentSpec(torch.float32, (self.conv.state, shape))

    def forward(self, x: Tensor, rotations: Mapping[Layer, Any], context: AttentionContext) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        (taps, state), rows = context.state(self.cache_index)
        keys, values = self.groups * self.sizes.key_dim, self.heads * self.sizes.value_dim
        mixed = self.input(x)
        if self.gate is None:
            mixed, gate = mixed.split((2 * keys + values, values), dim=1)
        else:
            gate = self.gate(x)
        decay, gain = self._rates(x)
        query, key, value = self.conv(mixed, taps, rows, silu=True).split((keys, keys, values), dim=1)
        query, key = (part.unflatten(1, (self.groups, -1)) for part in (query, key))
        read = self.kernels.outer_product_state(
            self.kernels.unit_heads(query, 1e-6, self.sizes.key_dim**-0.5),
            self.kernels.unit_heads(key, 1e-6, 1.0),
            value.unflatten(1, (self.heads, -1)),
            decay,
            gain,
            state,
            rows,
            delta=True,
        )
        normed = self.norm(read.reshape(-1, self.sizes.value_dim))
        gated = self.kernels.silu_gate(torch.cat((gate.reshape(normed.shape), normed), dim=1))
        return self.result(gated.view(len(x), -1))

    def _rates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return by what each head's state is multiplied, and how much of a token is written: [num_tokens, heads]."""
        written, time = self.rates(x).float().chunk(2, dim=1)
        # In fp64, as `sigmoid`: the bits of a number must not depend on its place.
        steps = F.softplus(time.double() + self.time_bias.double())
        decay = torch.exp(-self.decay_log.double().exp() * steps).float()
        return decay.contiguous(), sigmoid(written.contiguous())
