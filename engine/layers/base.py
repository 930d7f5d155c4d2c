"""What layers are built with and what they declare, and from that the tensors that a checkpoint must have."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionSpec
from engine.config import EngineConfig
from engine.kernels.base import Kernels, TorchKernels
from engine.kv.cache_specs import CacheSpec
from parallel.group import Group
from parallel.linear import LinearMethod, ParallelLinear
from parallel.parameter import Recipe, ShardedParameter

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Build:
    """How a model is built, the same for all its layers.

    dtype: of weights and activations. max_positions: tokens of the longest sequence that will be run.
    expert_parallel: whether each rank holds some experts whole, not a part of each.
    """

    group: Group
    dtype: torch.dtype
    max_positions: int
    expert_parallel: bool = False


class Layer(nn.Module):
    """A part of a model. Its parameters know how they are sharded and its linear layers how they are quantised.

    kernels: what it computes with. cache_index: its place among the layers that have a cache. holding: how a weight
    of its own, which is no linear layer's, is stored in a checkpoint, None = as it is.
    """

    kernels: Kernels = TorchKernels()
    cache_index: int = -1
    holding: LinearMethod | None = None

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec | None:
        """Return what the layer keeps of each token, None = nothing. dtype: what keys and values are kept in."""
        return None

    def attention_spec(self, config: EngineConfig, device: torch.device) -> AttentionSpec | None:
        """Return what the layer asks of attention backends, None = nothing. config: resolved."""
        return None

    def finish_loading(self) -> None:
        """Prepare what depends on the weights; called once, after all of them are loaded."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One tensor of a checkpoint.

    name: in the checkpoint. target: the model's parameter. part: the piece of a merged parameter, None = all of it.
    shape: on disk. transposed: stored as [in, out]. packed: four bytes in an int32. scale: of a quantised weight, one
    number for each row, which a checkpoint may hold in other shapes. index: of the entry of a tensor that holds
    several parameters stacked, None = it holds this one alone; shape is that of the entry.
    recipe: the parameter is made of several tensors, or entries of these, whose names begin with `stem`; shape is the
    parameter's.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    part: str | int | None = None
    transposed: bool = False
    packed: bool = False
    scale: bool = False
    index: int | None = None
    recipe: Recipe | None = None

    @property
    def stem(self) -> str:
        """What the names of a recipe's tensors begin with: tensors of all experts are no module's."""
        return f"{self.name}." if self.index is None else f"{self.name}_"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that must be there."""
        return (self.name,) if self.recipe is None else tuple(f"{self.stem}{leaf}" for leaf in self.recipe.tensors)

    @property
    def spare_names(self) -> tuple[str, ...]:
        """Names of tensors that may be there beside them."""
        return () if self.recipe is None else tuple(f"{self.stem}{leaf}" for leaf in self.recipe.spare)


class MadeTensors(Protocol):
    """Tensors of a model that are made of several of a checkpoint, or of parts of one."""

    target: str  # the first of them

    def tensors(self, read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Return them by their names in the rules. read: returns a tensor of the checkpoint by its name."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint holds a model whose tensors it has under other names, or in other shapes.

    plain: name in the rules -> name on disk. made: what has to be made. lacking: names in the rules of which nothing
    is on disk. unknown: on disk, and not of this model.
    """

    plain: Mapping[str, str]
    made: Sequence[MadeTensors]
    lacking: Sequence[str]
    unknown: Sequence[str]


class Conv1D(str):
    """The name of a linear layer whose weight is stored as [in, out]."""

    __slots__ = ()


class Stacked(str):
    """The name of a tensor, in full, that holds a weight of all experts or heads of a layer: [experts, out, in].

    Biases of experts are in another one, [experts, out], whose name ends in "_bias".
    """

    __slots__ = ()


class StackedConv1D(Stacked, Conv1D):
    """The same for weights that are stored as [experts, in, out]."""

    __slots__ = ()


# Weights of experts that a checkpoint may hold stacked: in the model -> the last part of their name there.
EXPERT = re.compile(r"(\.experts)\.(up|down)\.(\d+)\.weight$")
STACKED = {"up": "gate_up_proj", "down": "down_proj"}
# A module's path in the model, * for each number (of its layer, of an expert) where they are alike -> its name in the
# checkpoint, with the same numbers in the same order, or one for each piece of a merged product. A parameter that is
# not called as in the model is named by its own path.
Names = Mapping[str, str | tuple[str, ...]]


def checkpoint_names(names: Names, module: str) -> tuple[str, ...]:
    """Return what a module of the model, "layers.3.attention.qkv" say, is called in the checkpoint, piece by piece.

    Raises `KeyError` for a module that the family gives no name.
    """
    found, numbers = _named(names, module), LAYER_NUMBER.findall(module)
    pieces = (found,) if isinstance(found, str) else found
    return tuple(_numbered(each, numbers) for each in pieces)


def is_transposed(names: Names, module: str) -> bool:
    """Whether a module's weight is stored as [in, out]."""
    return isinstance(_named(names, module), Conv1D)


def is_stacked(names: Names, module: str) -> bool:
    """Whether a module's weight lies in a tensor of those of all experts."""
    return isinstance(_named(names, module), Stacked)


def _numbered(name: str, numbers: Sequence[str]) -> str:
    for number in numbers[: name.count("*")]:
        name = name.replace("*", number, 1)
    return name


def _named(names: Names, module: str) -> str | tuple[str, ...]:
    return names[module if module in names else LAYER_NUMBER.sub("*", module)]


def weight_rules(model: nn.Module, names: Names) -> Iterator[WeightRule]:
    """Yield a rule for each tensor that fills a parameter of `model`, a tied one once.

    Shapes are those of the parameters, put together over all ranks.
    """
    for target, parameter in model.named_parameters():
        module, _, leaf = target.rpartition(".")
        if not isinstance(parameter, ShardedParameter):
            raise TypeError(f"{target} is no parameter that can load itself")
        if target in names or LAYER_NUMBER.sub("*", target) in names:
            yield WeightRule(checkpoint_names(names, target)[0], target, parameter.full_shape())
            continue
        owner = model.get_submodule(module)
        method = owner.method if isinstance(owner, ParallelLinear) else getattr(owner, "holding", None)
        stored = leaf if method is None else method.stored_names.get(leaf, leaf)
        transposed = leaf == "weight" and is_transposed(names, module)
        found = checkpoint_names(names, module)
        if isinstance(_named(names, module), Stacked):
            recipe = None if method is None else method.recipe(leaf, parameter.full_shape())
            name = f"{found[0]}_bias" if leaf == "bias" else found[0]
            yield _stacked(name, target, parameter, transposed and recipe is None, recipe)
            continue
        parts = [None] if len(found) == 1 else [piece.key for piece in parameter.pieces]
        for name, part in zip(found, parts, strict=True):
            shape = parameter.full_shape(part)
            recipe = None if method is None else method.recipe(leaf, shape)
            if recipe is not None:
                if leaf == "weight" and method is not None:
                    shape = (shape[0], shape[1] * method.numbers)
                yield WeightRule(name, target, shape, part, scale=leaf != "weight", recipe=recipe)
                continue
            yield WeightRule(
                f"{name}.{stored}",
                target,
                shape[::-1] if transposed else shape,
                part,
                transposed,
                packed=stored.endswith("_packed"),
                scale=leaf == "weight_scale",
            )


def _stacked(
    name: str, target: str, parameter: ShardedParameter, transposed: bool, recipe: Recipe | None = None
) -> WeightRule:
    """Return the rule of one expert's parameter, which a checkpoint holds together with those of all others."""
    shape, index = parameter.full_shape(), int(LAYER_NUMBER.findall(target)[-1])
    on_disk = shape[::-1] if transposed else shape
    return WeightRule(name, target, on_disk, transposed=transposed, index=index, recipe=recipe)


def stacked_where_stored(
    rules: Iterable[WeightRule], model: nn.Module, on_disk: Collection[str]
) -> Iterator[WeightRule]:
    """Yield the rules, those of experts for the tensors of all experts where a checkpoint has these instead.

    transformers 5 keeps them so, and some save them so: gate_up_proj, [experts, 2 * inner, hidden], gate before up,
    and down_proj, [experts, hidden, inner].
    """
    seen: set[str] = set()
    for rule in rules:
        expert = EXPERT.search(rule.target)
        if expert is None or rule.name in on_disk or rule.index is not None or rule.recipe is not None:
            yield rule
            continue
        name = rule.name[: rule.name.index(f".{expert[3]}.", rule.name.index("experts"))] + "." + STACKED[expert[2]]
        if name not in on_disk:
            yield rule
        elif rule.target not in seen:
            seen.add(rule.target)
            parameter = model.get_parameter(rule.target)
            if not isinstance(parameter, ShardedParameter):
                raise TypeError(f"{rule.target} is no parameter that can load itself")
            yield _stacked(name, rule.target, parameter, False)
