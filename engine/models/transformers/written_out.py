"""Attention that a model writes out itself: queries by keys, a scale, softmax, by values, in torch's own products.

What a product of queries and keys gives is no tensor but `Scores`, which knows what may be done with it before the
product with the values asks the paged cache. All else is refused: a bias, a mask, any other function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from engine.errors import CheckpointError

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SOFTMAX = (F.softmax, torch.softmax)
# (module, queries, keys, values, scale) -> [1, num_tokens, heads, value_dim]; the former [1, heads, num_tokens, dim].
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class Scores:
    """Queries by keys, not computed. shape: as the model sees it. soft: whether the softmax was taken.

    finish: returns what a softmax by values is.
    """

    query: Tensor
    key: Tensor
    shape: torch.Size
    finish: Callable[[Scores, Tensor], Tensor]
    scale: float = 1.0
    soft: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries."""
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        """That of the queries."""
        return self.query.device

    def size(self, dim: int | None = None) -> Any:
        """Return as `Tensor.size` does."""
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: int) -> Scores:
        """Put heads into a dimension of their own, or into that of sequences; queries and keys stay the last two."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        found = torch.empty(self.shape, device="meta").view(wanted).shape
        if found[-2:] != self.shape[-2:]:
            self._refuse("view")
        return replace(self, shape=found)

    reshape = view

    def to(self, *_: Any, **__: Any) -> Scores:
        """Return the same: the cache's attention has a precision of its own."""
        return self

    float = type_as = to

    def __mul__(self, factor: object) -> Scores:
        if self.soft or not isinstance(factor, int | float):
            return self._refuse("a product with a tensor")
        return replace(self, scale=self.scale * factor)

    def __truediv__(self, divisor: object) -> Scores:
        if isinstance(divisor, Tensor) and divisor.ndim == 0 and not divisor.is_meta:
            divisor = divisor.item()
        if self.soft or not isinstance(divisor, int | float):
            return self._refuse("a quotient with a tensor")
        return replace(self, scale=self.scale / divisor)

    def __add__(self, mask: object) -> Scores:
        if mask is not None:
            self._refuse("a mask or a bias")
        return self

    def __matmul__(self, value: Tensor) -> Tensor:
        if not self.soft:
            self._refuse("a product without a softmax")
        return self.finish(self, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        scores = args[0]
        given = kwargs or {}
        if isinstance(scores, Scores):
            if func in SOFTMAX and (args[1:] or (given.get("dim"),))[0] in (-1, len(scores.shape) - 1):
                return replace(scores, soft=True)
            if func is F.dropout and not given.get("training", True):
                return scores
            if func in PRODUCTS:
                return scores @ args[1]
        return cls._refuse(getattr(func, "__name__", str(func)))

    @staticmethod
    def _refuse(what: str) -> Any:
        raise CheckpointError(f"config.json: attention that the model writes out has {what}, which is not supported")


class WrittenOut(TorchFunctionMode):
    """Has products of queries and keys be `Scores`. module: returns the one that attends."""

    def __init__(self, module: Callable[[], nn.Module], attend: Attend) -> None:
        super().__init__()
        self._module, self._attend = module, attend
        self._zeros: Tensor | None = None

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and isinstance(args[0], Tensor) and _are_queries_and_keys(*args[:2]):
            query, key = args[0], args[1].transpose(-1, -2)
            shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) + (query.shape[-2],) * 2
            return Scores(query, key, torch.Size(shape), self._finish)
        if func is torch.zeros and len(args) == 3:  # that a product is added to
            self._zeros = func(1, **(kwargs or {})).expand(args)
            return self._zeros
        if func is torch.baddbmm and args[0] is self._zeros and _are_queries_and_keys(*args[1:3]):
            query, key = args[1], args[2].transpose(-1, -2)
            return Scores(query, key, self._zeros.shape, self._finish, (kwargs or {}).get("alpha", 1.0))
        return func(*args, **(kwargs or {}))

    def _finish(self, scores: Scores, value: Tensor) -> Tensor:
        """Attend and return what a softmax by values is: as many dimensions as those, [.., num_tokens, value_dim]."""
        query, key = (part if part.ndim == 4 else part[None] for part in (scores.query, scores.key))
        whole = value if value.ndim == 4 else value[None]
        found = self._attend(self._module(), query.to(value.dtype), key.to(value.dtype), whole, scores.scale)
        heads = found.transpose(1, 2)
        return heads if value.ndim == 4 else heads[0]


def _are_queries_and_keys(left: Tensor, right: object) -> bool:
    """Whether a product is [.., tokens, head_dim] by [.., head_dim, tokens] of what is no weight."""
    if not isinstance(right, Tensor) or any(isinstance(one, nn.Parameter) for one in (left, right)):
        return False
    if left.ndim != right.ndim or left.ndim not in (3, 4) or not left.is_floating_point():
        return False
    return left.shape[-2] == right.shape[-1] and left.shape[-1] > 1
