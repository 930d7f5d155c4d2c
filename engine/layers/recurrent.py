"""Layers that keep a recurrent state instead of keys and values; this rank's share of their channels and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError
from engine.kernels.recurrent import StateRows
from engine.kv.cache_specs import RecurrentSpec
from engine.layers.base import Build, Layer
from engine.layers.rope import Rotary
from parallel.linear import MergedColumnParallelLinear, RowParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import even_pieces

MOST_TAPS = 8  # of a convolution; more than any known model has


class CausalConv(Layer):
    """A causal convolution of each channel by itself, a torch `Conv1d` in the checkpoint.

    sizes: channels of each part, which are split over the ranks part by part. taps: tokens that it sees.

    Raises `CheckpointError` for taps that are not implemented, `ShardingError` where channels do not divide.
    """

    weight: ShardedParameter
    bias: ShardedParameter | None

    def __init__(self, sizes: Sequence[int], taps: int, bias: bool, build: Build) -> None:
        super().__init__()
        if not 2 <= taps <= MOST_TAPS:
            raise CheckpointError(
                f"config.json: a convolution over {taps} tokens is not supported; 2 to {MOST_TAPS} are"
            )
        group = build.group
        pieces = even_pieces(sizes, group.rank, group.size, "channels")
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
