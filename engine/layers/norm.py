"""RMSNorm (Zhang and Sennrich) and LayerNorm over the last dimension, whole on every rank; statistics in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.base import Build, Layer
from parallel.parameter import ShardedParameter, replicated


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight."""

    weight: ShardedParameter

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated((size,), build.dtype, build.group.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Add x, unless it is None, to `residual` in place and return the sum normed; all [num_tokens, size]."""
        if x is None:
            return self.forward(residual)
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)


class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    weight: ShardedParameter
    bias: ShardedParameter

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = (replicated((size,), build.dtype, build.group.device) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Add x, unless it is None, to `residual` in place and return the sum normed; all [num_tokens, size]."""
        return self.forward(residual if x is None else residual.add_(x))


Norm = RMSNorm | LayerNorm
