"""Feed-forward layers; this rank's share of their width."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from engine.layers.base import Build, Layer
from parallel.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in x's dtype, the same bits for a number wherever it lies.

    Torch's own in fp32 rounds by the place in the tensor; in fp64 that is lost in the rounding to fp32.
    """
    return x.double().sigmoid().to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


# By their names in config.json.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
}


class MLP(Layer):
    """down(activation(up(x)))."""

    def __init__(self, hidden: int, inner: int, activation: str, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = ColumnParallelLinear(hidden, inner, bias, build.group, build.dtype)
        self.down = RowParallelLinear(inner, hidden, bias, build.group, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down(self.activation(self.up(x)))

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum that the output is: [num_tokens, hidden]."""
        return self.down.part(self.activation(self.up(x)))


class Gate(Layer):
    """activation(gate) * up of what one product gave side by side."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, gate | up] -> [num_tokens, width of each]."""
        if self.activation is F.silu:
            return self.kernels.silu_gate(x)
        if self.activation is _gelu_tanh:
            return self.kernels.gelu_gate(x)
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)), gate and up in one product (Shazeer, "GLU Variants Improve Transformer")."""

    def __init__(self, hidden: int, inner: int, activation: str, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Gate(activation)
        self.up = MergedColumnParallelLinear(hidden, [inner, inner], bias, build.group, build.dtype)
        self.down = RowParallelLinear(inner, hidden, bias, build.group, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self.down(self.gate(self.up(x)))

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum that the output is: [num_tokens, hidden]."""
        return self.down.part(self.gate(self.up(x)))
