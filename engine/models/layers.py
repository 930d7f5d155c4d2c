"""The parts of a decoder that are not split over ranks: norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.base import Kernels, TorchKernels
from parallel.parameter import ShardedParameter, replicated


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich) or LayerNorm over the last dimension; statistics in fp32."""

    weight: ShardedParameter
    bias: ShardedParameter | None

    def __init__(self, kind: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.layer_norm = kind == "layer"
        self.weight = replicated(self.shape, dtype, device)
        self.bias = replicated(self.shape, dtype, device) if self.layer_norm else None
        self.kernels: Kernels = TorchKernels()

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed: [num_tokens, size]."""
        if self.layer_norm:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """Add x, unless it is None, to `residual` in place and return the sum normed; all [num_tokens, size]."""
        if x is None:
            return self.forward(residual)
        if self.layer_norm:
            return self.forward(residual.add_(x))
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
