"""How a linear layer multiplies: small method objects, chosen once the weights are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override


class LinearMethod(ABC):
    """Multiplies by one weight in whatever form it keeps it (plain, packed, quantised)."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`; x is [num_tokens, in], the result [num_tokens, out] in x's dtype."""


class PlainLinear(LinearMethod):
    """The parameter as it was loaded, through `F.linear`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [out, in]

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)
