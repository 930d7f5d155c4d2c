"""Products with quantised weights that are made plain for each product, some outputs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import FEW_ROWS, FourBits
from engine.quantization.layout import dequantised
from engine.quantization.method import Pack
from parallel.linear import LinearMethod, PlainLinear
from parallel.parameter import Recipe

PLAIN_WEIGHTS = 1 << 21  # that are there at one time, about
OUTPUTS = 64  # a multiple of which is taken at a time: what packed weights lie in


class WidenedProduct:
    """Multiplies by rows [first, last) of a weight [out, in] that `plain` makes, in the dtype of the activations.

    pack: as of `QuantizedLinear.use_kernels`. Where it gives a row the same bits in any company, so does this.
    """

    def __init__(self, outs: int, ins: int, pack: Pack = PlainLinear) -> None:
        self._outs = outs
        self._pack = pack
        self._ins = ins

    def apply(self, x: Tensor, bias: Tensor | None, plain: Callable[[int, int], Tensor]) -> Tensor:
        """Return the product, [rows, out] in x's dtype."""
        if not len(x):
            return x.new_empty(0, self._outs)
        out = x.new_empty(len(x), self._outs)
        at_once = max(OUTPUTS, PLAIN_WEIGHTS // max(1, self._ins) // OUTPUTS * OUTPUTS)
        step = at_once if x.device.type == "cpu" else self._outs
        for first in range(0, self._outs, step):
            last = min(first + step, self._outs)
            part = None if bias is None else bias[first:last]
            out[:, first:last] = self._pack(plain(first, last)).apply(x, part)
        return out


class FewRowsLinear(LinearMethod):
    """Two ways to multiply by one weight: `few` reads it as it is stored, `many` makes it plain first."""

    def __init__(self, few: LinearMethod, many: LinearMethod) -> None:
        self._few, self._many = few, many

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return (self._few if len(x) <= FEW_ROWS else self._many).apply(x, bias)

    @override
    def describe(self) -> str:
        return f"{self._few.describe()} or {self._many.describe()}"

    @override
    def tensors(self) -> Iterator[Tensor]:
        yield from self._few.tensors()


class MadePlain(PlainLinear):
    """A weight that a checkpoint holds quantised and that is made plain as it is loaded.

    recipe_of: from outputs, inputs and dtype to how it is made.
    """

    def __init__(self, weight: Tensor, recipe_of: Callable[[int, int, torch.dtype], Recipe]) -> None:
        super().__init__(weight)
        self._recipe_of = recipe_of
        self._dtype = weight.dtype

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        return self._recipe_of(shape[0], shape[1], self._dtype) if parameter == "weight" else None


class ReorderedLinear(LinearMethod):
    """A product whose weight has its inputs in another order: the one of x's features, [in] int64."""

    def __init__(self, inner: LinearMethod, order: Tensor) -> None:
        self._inner = inner
        self._order = order

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._inner.apply(x.index_select(1, self._order), bias)

    @override
    def describe(self) -> str:
        return f"reordered {self._inner.describe()}"

    @override
    def tensors(self) -> Iterator[Tensor]:
        yield self._order
        yield from self._inner.tensors()


def widened_codes(weight: FourBits, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    """Return what makes rows of a weight in four bits plain."""
    return lambda first, last: dequantised(weight.rows(first, last), dtype)
