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

    A row's bits must not depend on its company. oneDNN sums each row in the same order however many rows there are,
    but for two cases, which the caller finds by trying (`parallel.tuning`): a single row of a wide input, multiplied
    as two with `pairs_single_row` set; and bfloat16 on CPUs with AMX, where only the numbers of rows in `row_counts`
    (ascending) are multiplied at once: what is left over is filled up to the next of them with zeros.

    oneDNN builds a kernel for each row count it meets, about half a millisecond per layer shape: callers that can
    choose should use few row counts.
    """

    def __init__(self, weight: Tensor) -> None:
        self.pairs_single_row = False
        self.row_counts: tuple[int, ...] = ()  # any number where empty
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
        if self.row_counts:
            return self._in_counts(x, bias)
        if self.pairs_single_row and x.shape[0] == 1:
            return self._product(x.repeat(2, 1), bias)[:1]
        return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, self._packed, bias, "none", [], "")

    def _in_counts(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as many rows at once as `row_counts` allow."""
        most = self.row_counts[-1]
        pieces = []
        for rows in x.split(most):
            count = next(count for count in self.row_counts if count >= len(rows))
            filled = rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))
            pieces.append(self._product(filled, bias)[: len(rows)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
