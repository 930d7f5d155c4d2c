"""How a model finds the places of its tokens: whether it takes the positions that it is told, or counts by itself.

Nothing is computed but what depends on ids and positions alone: that is known in a pass over the device meta, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from engine.errors import CheckpointError
from engine.models.transformers.entered import Entered

META, CPU = torch.device("meta"), torch.device("cpu")
ORDER = (3, 0, 5, 1, 6, 2, 4)  # of positions that a model is told; as many as nothing else of a model is
MOST_VALUES = 100_000
UNKNOWN = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)


@dataclass(frozen=True, slots=True)
class Counted:
    """An embedding whose places a model counts by itself. offset: of its row for position 0. ndim: of its indices."""

    path: str
    offset: int
    ndim: int


@dataclass(frozen=True, slots=True)
class Use:
    """What is known, differs between tokens and meets what is not known: a place in a table, or angles.

    turn: how often the module has used the function so before.
    """

    path: str
    module: nn.Module
    function: str
    turn: int
    values: Tensor


def counted(
    model: nn.Module, entered: Entered, run: Callable[[Tensor, Tensor | None], Tensor], token: int
) -> list[Counted]:
    """Return the embeddings whose places `model`, on the device meta, counts by itself.

    entered: follows it. run: over ids and positions, None = without being told. token: one that is no padding. Raises
    `CheckpointError` for a model that takes other positions when it is told them than by itself, or counts them where
    it looks up nothing.
    """
    paths = {module: path for path, module in model.named_modules()}
    untold = {(use.path, use.function, use.turn): use.values for use in _uses(entered, paths, run, token, None)}
    found = []
    for use in _uses(entered, paths, run, token, ORDER):
        own = untold.get((use.path, use.function, use.turn))
        offset = int(use.values.flatten()[0])
        counts = isinstance(use.module, nn.Embedding) and use.values.flatten().tolist() == _counting(offset)
        if own is None:  # of a buffer, say, whose contents are not known here
            told = use.values.flatten().tolist() == [place + offset - ORDER[0] for place in ORDER]
        else:
            told = torch.equal(use.values, _reordered(own))
            counts = counts and torch.equal(use.values, own)
        if counts:
            found.append(Counted(use.path, offset, use.values.ndim))
        elif not told:
            name = type(model).__name__
            raise CheckpointError(f"config.json: {use.path} of {name} has other positions than those it is told")
    return found


def tell(model: nn.Module, embeddings: Iterable[Counted], positions: Callable[[], Tensor]) -> None:
    """Have embeddings look up the positions of a step in the place of those that the model counts."""
    for one in embeddings:
        module = model.get_submodule(one.path)
        module.forward = _told(module.forward, one, positions)


def _told(plain: Callable[..., Tensor], counted: Counted, positions: Callable[[], Tensor]) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        places = positions().long() + counted.offset
        with _LookUp(places.view(*[1] * (counted.ndim - 1), -1)):
            return plain(*args, **kwargs)

    return forward


class _LookUp(TorchFunctionMode):
    """Looks up other rows than it is asked for."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        self._places = places

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.embedding:
            args = (self._places, *args[1:])
        return func(*args, **(kwargs or {}))


class _Known(TorchDispatchMode):
    """Knows the values of tensors on the device meta that come from what is known, and what they are used for."""

    def __init__(self, use: Callable[[str, Tensor], None], slice_: Callable[[], None]) -> None:
        super().__init__()
        self._use, self._slice = use, slice_
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # by id of a tensor, which is kept: the id stays its own

    def learn(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Take `value` for what a tensor holds."""
        self._known[id(tensor)] = (tensor, value)
        return tensor

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        tensors = _tensors((args, given))
        values = [self._known[id(one)][1] for one in tensors if id(one) in self._known]
        results = _tensors(out)
        if func is torch.ops.aten.slice.Tensor and _by_length(args[0], out):
            self._slice()
        if len(values) < len(tensors):
            for value in values if results else ():
                self._use(str(func), value)
        elif results and sum(one.numel() for one in results) <= MOST_VALUES and func not in UNKNOWN:
            own = tree_map(self._own, (args, given))
            for result, value in zip(results, _tensors(func(*own[0], **own[1])), strict=True):
                self.learn(result, value)
        return out

    def _own(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._known[id(leaf)][1]
        return CPU if isinstance(leaf, torch.device) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _uses(
    entered: Entered,
    paths: dict[nn.Module, str],
    run: Callable[[Tensor, Tensor | None], Tensor],
    token: int,
    positions: Sequence[int] | None,
) -> list[Use]:
    found: list[Use] = []

    def use(function: str, values: Tensor) -> None:
        if _differs(values):
            module = entered.current()
            turn = sum(one.module is module and one.function == function for one in found)
            found.append(Use(paths[module], module, function, turn, values))

    def refuse() -> None:
        path = paths[entered.current()]
        raise CheckpointError(f"config.json: {path} takes as many rows of a tensor as a step has tokens")

    with torch.no_grad(), _Known(use, refuse) as known:

        def meta(values: Sequence[int]) -> Tensor:
            held = torch.tensor(values, device=CPU)
            return known.learn(torch.empty(len(values), dtype=torch.long, device=META), held)

        run(meta([token] * len(ORDER)), None if positions is None else meta(positions))
    return found


def _by_length(tensor: Tensor, part: Tensor) -> bool:
    """Whether a part of a tensor has as many rows as there are tokens, and the tensor more.

    Whole numbers are left: BERT takes the types of tokens so, which are zeros.
    """
    if not tensor.is_floating_point():
        return False
    pairs = zip(tensor.shape, part.shape, strict=True)
    return any(size != rows == len(ORDER) for size, rows in pairs)


def _differs(values: Tensor) -> bool:
    """Whether values are of the tokens and not the same for each."""
    if len(ORDER) not in values.shape:
        return False
    rows = values.movedim(values.shape.index(len(ORDER)), 0)
    return bool((rows != rows[:1]).any())


def _reordered(values: Tensor) -> Tensor:
    """Return the values of tokens that are told positions in `ORDER`, of those of tokens in their places."""
    return values.index_select(values.shape.index(len(ORDER)), torch.tensor(ORDER, device=values.device))


def _counting(first: int) -> list[int]:
    return list(range(first, first + len(ORDER)))
