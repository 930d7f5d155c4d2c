"""How a linear layer multiplies: small method objects, chosen once the weights are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

# Row count that oneDNN's layout is chosen for. A layout for one row is slow for many; one for 64 is good for any.
PACKING_ROWS = 64


class LinearMethod(ABC):
    """Multiplies by one weight in whatever form it keeps it (plain, packed, quantised)."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`; x is [num_tokens, in], the result [num_tokens, out] in x's dtype."""

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


class PackedLinear(LinearMethod):
    """The weight reordered once into oneDNN's blocked layout (CPU); it does not keep the weight it was made from.

    For CPUs and dtypes that the engine's compiled products are not written for, and where there is no compiler.

    oneDNN sums each row in the same order however many rows there are, except for a single row of a wide input. With
    `pairs_single_row` set, a single row is multiplied as two, so that a row's bits never depend on its company.

    oneDNN builds a kernel for each row count it meets, about half a millisecond per layer shape: callers that can
    choose should use few row counts.
    """

    def __init__(self, weight: Tensor, pairs_single_row: bool = False) -> None:
        self.pairs_single_row = pairs_single_row
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this machine's oneDNN can pack `weight`."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype is torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype is torch.float32

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.pairs_single_row and x.shape[0] == 1:
            return self._multiply(x.repeat(2, 1), self._packed, bias, "none", [], "")[:1]
        return self._multiply(x, self._packed, bias, "none", [], "")
