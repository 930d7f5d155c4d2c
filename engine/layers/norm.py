"""RMSNorm (Zhang and Sennrich) and LayerNorm over the last dimension, whole on every rank; statistics in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from engine.layers.base import Build, Layer
from parallel.parameter import ShardedParameter, replicated
from parallel.sharding import Piece, even_pieces, kv_head_start, kv_heads_per_rank


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * (offset + weight).

    offset: 1 in Gemma, whose weights are kept around 0. It is added once they are loaded. In bfloat16 the sum would
    lose what the weights say, so that such a norm is computed in fp32 there.
    """

    weight: ShardedParameter

    def __init__(self, size: int, eps: float, build: Build, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        dtype = torch.float32 if offset else build.dtype
        self.weight = replicated((size,), dtype, build.group.device)

    @override
    def finish_loading(self) -> None:
        if self.offset:
            self.weight.data = self.weight.data + self.offset

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, size]."""
        if self.weight.dtype is not x.dtype:
            return self.kernels.rms_norm(x.float(), self.weight, self.eps).to(x.dtype)
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Add x, unless it is None, to `residual` in place and return the sum normed; all [num_tokens, size]."""
        if x is None:
            return self.forward(residual)
        if self.weight.dtype is not x.dtype:
            return self.forward(residual.add_(x))
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)


class HeadsNorm(Layer):
    """RMSNorm over all heads of a token together, which lie on all ranks (OLMo 2, MiniMax M2).

    heads: of all ranks. copies: ranks that hold the same heads, which must count once.
    """

    weight: ShardedParameter

    def __init__(self, heads: int, head_dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.group, self.eps, self.size = build.group, eps, heads * head_dim
        own = kv_heads_per_rank(heads, build.group.size) * head_dim
        first = kv_head_start(heads, build.group.rank, build.group.size) * head_dim
        self.copies = own * build.group.size // self.size
        pieces = (Piece("", self.size, first, own, 0),)
        self.weight = ShardedParameter.of((own,), build.dtype, build.group.device, 0, pieces)

    @property
    def spans_ranks(self) -> bool:
        """Whether its sums are over features of several ranks."""
        return self.group.size > 1

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, features of this rank's heads], rows may be strided."""
        if not self.spans_ranks:
            return self.kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        wide = x.float()
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True)) / (self.size * self.copies)
        return (wide * torch.rsqrt(squares + self.eps)).to(x.dtype) * self.weight


class GroupsNorm(Layer):
    """RMSNorm of each of several groups of features by itself; a group may lie on several ranks (Mamba-2).

    size: features of all ranks.
    """

    weight: ShardedParameter

    def __init__(self, size: int, groups: int, eps: float, build: Build) -> None:
        super().__init__()
        group = build.group
        self.group, self.groups, self.eps, self.width = group, groups, eps, size // groups
        self.first = kv_head_start(groups, group.rank, group.size)
        pieces = even_pieces([size], group.rank, group.size, "features")
        self.weight = ShardedParameter.of((pieces[0].size,), build.dtype, group.device, 0, pieces)
        self.ones = torch.ones(self.width, dtype=build.dtype, device=group.device)

    @property
    def spans_ranks(self) -> bool:
        """Whether its sums are over features of several ranks."""
        return bool(self.groups % self.group.size)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, features of this rank]."""
        if not self.spans_ranks:
            rows = self.kernels.rms_norm(x.reshape(-1, self.width), self.ones, self.eps)
            return rows.view(x.shape) * self.weight
        wide = x.float()
        squares = wide.new_zeros(len(x), self.groups)
        squares[:, self.first] = wide.square().sum(-1)
        mean = self.group.all_reduce(squares)[:, self.first : self.first + 1] / self.width
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    weight: ShardedParameter
    bias: ShardedParameter | None

    def __init__(self, size: int, eps: float, build: Build, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated((size,), build.dtype, build.group.device)
        self.bias = replicated((size,), build.dtype, build.group.device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Add x, unless it is None, to `residual` in place and return the sum normed; all [num_tokens, size]."""
        return self.forward(residual if x is None else residual.add_(x))


class EachHeadNorm(Layer):
    """LayerNorm without bias of each head, with weights of its own (StableLM 2, Command R+).

    heads: of all ranks; every rank reads the weights of all, which are few, and keeps those of its own at hand.
    order: of the features of a head, as the product gives them; None = as in the checkpoint. scales: weights of the
    heads of this rank in that order, [heads, head_dim], once they are loaded.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, build: Build, order: Sequence[int] | None) -> None:
        super().__init__()
        self.eps, self.head_dim, self.order = eps, head_dim, order
        first = kv_head_start(heads, build.group.rank, build.group.size)
        count = kv_heads_per_rank(heads, build.group.size)
        self.own = slice(first, first + count)
        self.norms = nn.ModuleList(LayerNorm(head_dim, eps, build, bias=False) for _ in range(heads))
        self.scales = torch.ones(count, head_dim, dtype=build.dtype, device=build.group.device)

    @override
    def finish_loading(self) -> None:
        scales = torch.stack([weight.data for weight in self.parameters()][self.own])
        self.scales = scales if self.order is None else scales[:, self.order]

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, features of this rank's heads], rows may be strided."""
        heads = x.unflatten(1, (-1, self.head_dim))
        return (F.layer_norm(heads, (self.head_dim,), eps=self.eps) * self.scales).flatten(1)


Norm = RMSNorm | LayerNorm
