"""What a step launches and sends, counted while the code that serves runs in shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from engine.kernels.base import Kernels
from engine.layers.moe import Experts
from engine.models.blueprint import BlueprintGroup
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
    """While entered, counts the operations that a GPU would launch kernels for.

    times: as how many each one counts from now on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.times = 1
        self._inside = False

    @contextmanager
    def as_kernels(self, number: int) -> Iterator[None]:
        """Count all that happens inside as so many: kernels of ours do it."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before
            self.count += 0 if before else number * self.times

    @override
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._inside and _computes(func):
            self.count += self.times
        return func(*args, **(kwargs or {}))


def _computes(func: OpOverload) -> bool:
    name = func._schema.name.partition("::")[2]
    returns = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    return not is_view and name not in NO_KERNEL


class CountedCalls:
    """What has all that `inner` has, each call of which counts as `number` launches."""

    def __init__(self, inner: object, launches: Launches, number: int = 1) -> None:
        self._inner = inner
        self._launches = launches
        self._number = number

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._launches.as_kernels(self._number):
                return found(*args, **kwargs)

        return call


def count_step(
    model: CausalLM, kernels: Kernels, run: Callable[[], object], tokens: int, times: Mapping[nn.Module, int]
) -> StepCounts:
    """Return what `run`, a step of so many tokens in shapes, launches and sends; the model is of no use afterwards.

    kernels: what a GPU computes with, in shapes. A product counts as one launch, however its weights are held, with
    another one where activations are made fp8 first. times: as how many a layer counts that stands for others.
    """
    launches, group = Launches(), model.group
    for part in model.parts():
        part.kernels = cast("Any", CountedCalls(kernels, launches))
        if isinstance(part, Experts) and part.grouped is not None:
            up, down = part.grouped
            part.grouped = cast("Any", (CountedCalls(up, launches), CountedCalls(down, launches)))
    for linear in [part for part in model.modules() if isinstance(part, ParallelLinear)]:
        kernels_of_product = 2 if isinstance(linear.method, Fp8Linear) else 1
        linear.method = cast("Any", CountedCalls(linear.method, launches, kernels_of_product))

    def count_as(number: int) -> None:
        launches.times = number
        if isinstance(group, BlueprintGroup):
            group.times = number

    for layer, number in times.items():
        layer.register_forward_pre_hook(lambda *_, number=number: count_as(number))
        layer.register_forward_hook(lambda *_: count_as(1))
    before = (group.exchanges, group.sent_bytes) if isinstance(group, BlueprintGroup) else (0, 0)
    with launches:
        run()
    attending = ATTENTION * len(model.attention)
    if not isinstance(group, BlueprintGroup):
        return StepCounts(launches.count + attending)
    sent = (group.sent_bytes - before[1]) // tokens
    return StepCounts(launches.count + attending, group.exchanges - before[0], sent)
