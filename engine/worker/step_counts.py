"""What a step launches and sends, counted while the code that serves runs in shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from engine.kernels.base import Kernels
from engine.layers.moe import Experts
from engine.models.causal_lm import CausalLM
from engine.quantization.fp8 import Fp8Linear
from parallel.linear import ParallelLinear

# Operations that make or name a tensor and compute nothing, beside views.
NO_KERNEL = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
)
ATTENTION = (
    2  # of each layer that attends: over pieces of the keys, and over the pieces (`engine.kernels.triton_attend`)
)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of one step of one rank.

    launches: kernels. exchanges: sums and exchanges between ranks. token_bytes: bytes that these send for each token,
    all together.
    """

    launches: int = 0
    exchanges: int = 0
    token_bytes: int = 0


class Launches(TorchDispatchMode):
    """While entered, counts the operations that a GPU would launch kernels for, one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._inside = False

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Count all that happens inside as one: a kernel of ours does it."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before
            self.count += not before

    @override
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._inside and _computes(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _computes(func: OpOverload) -> bool:
    name = func._schema.name.partition("::")[2]
    returns = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    return not is_view and name not in NO_KERNEL


class CountedCalls:
    """What has all that `inner` has, each call of which counts as one launch."""

    def __init__(self, inner: object, launches: Launches) -> None:
        self._inner = inner
        self._launches = launches

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._launches.as_one():
                return found(*args, **kwargs)

        return call


def count_launches(model: CausalLM, kernels: Kernels, run: Callable[[], object]) -> int:
    """Return what `run`, which computes a step of `model` in shapes, launches; the model is of no use afterwards.

    kernels: what a GPU computes with, in shapes. A product counts as one launch, however its weights are held, with
    another one where activations are made fp8 first.
    """
    launches = Launches()
    counted: Any = CountedCalls(kernels, launches)
    for part in model.parts():
        part.kernels = counted
        if isinstance(part, Experts) and part.grouped is not None:
            up, down = part.grouped
            part.grouped = cast("Any", (CountedCalls(up, launches), CountedCalls(down, launches)))
    made_fp8 = 0
    for layer in [part for part in model.modules() if isinstance(part, ParallelLinear)]:
        made_fp8 += isinstance(layer.method, Fp8Linear)
        layer.method = cast("Any", CountedCalls(layer.method, launches))
    with launches:
        run()
    return launches.count + made_fp8 + ATTENTION * len(model.attention)
