"""What a quantised checkpoint, or a flag, says of the linear layers inside a decoder's layers. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any, NoReturn

from engine.errors import CheckpointError

FIELD = "config.json: quantization_config"
SERVED = (
    "served are compressed-tensors (int8 per channel and group, int4 by group, fp8 per tensor, channel and block, "
    "NVFP4, MXFP4), fp8 with or without weight_block_size, GPTQ and AutoRound in 4 and 8 bits, AWQ in 4, modelopt's "
    "FP8, NVFP4 and mixtures of these, MXFP4 of gpt-oss. Or take the unquantised checkpoint with --quantization "
    "int8 or int4, or fp8 on a GPU"
)
LINEAR = "Linear"
PLAIN = "plain"
FOUR_BITS = ("int4", "nvfp4", "mxfp4")
GPTQ_LAYOUTS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How linear layers are held; embeddings and output head stay as they are.

    method: the name of `--quantization`. weights: "fp8" (e4m3), "int8", "int4", "nvfp4", "mxfp4", or among `others`
    `PLAIN`, of layers that stay so. stored: in the checkpoint, else made as plain weights are loaded. ignore: modules
    that stay plain, by their names in the checkpoint, parts of these between dots, patterns with *, or "re:" and a
    regular expression.
    packed: int8 alone: four in an int32 on disk, counted from -128, as compressed-tensors has them.
    plain_activations: fp8 alone: whether only the weights are multiplied in fp8, not the activations.
    layout: how four bits lie on disk: "pack-quantized", "gptq", "gptq_v2", "awq"; "nvfp4-pack-quantized", "modelopt";
    "mxfp4-pack-quantized", or "blocks", experts of gpt-oss alone. int8 may lie as "gptq" or "gptq_v2", too.
    group: inputs of four bits that share a scale; 0 = all. block: outputs and inputs of eight bits that do; None =
    each output has one, or all share it. scale_name: of scales on disk. zeros: whether compressed-tensors has zero
    points. reordered: whether groups are of inputs in another order (GPTQ's desc_act).
    targets: which layers, by name, "re:" and a regular expression, or "Linear" for all that no other names. named:
    which layers, by name, or that of a module that they are part of, whatever targets say. others: specs of others.
    Of targets that fit a layer, the first in this order decide.
    prefixes: of a text half: what names may begin with in a list, and what they do here.
    """

    method: str
    weights: str
    stored: bool = True
    ignore: tuple[str, ...] = ()
    packed: bool = False
    plain_activations: bool = False
    layout: str = ""
    group: int = 0
    block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"
    zeros: bool = False
    reordered: bool = False
    targets: tuple[str, ...] = (LINEAR,)
    named: frozenset[str] = frozenset()
    others: tuple[QuantizationSpec, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    @property
    def all(self) -> tuple[QuantizationSpec, ...]:
        """This one and the others."""
        return (self, *self.others)

    @property
    def form(self) -> QuantizationSpec:
        """How a layer is held, whatever other layers are, and whatever the lists call it."""
        return replace(self, ignore=(), targets=(), named=frozenset(), others=(), prefixes=())

    @property
    def in_blocks(self) -> bool:
        """Whether the experts of a layer lie in one tensor, as in gpt-oss."""
        return self.layout == "blocks"

    @property
    def is_gptq(self) -> bool:
        """Whether weights lie as GPTQ's."""
        return self.layout in GPTQ_LAYOUTS

    @property
    def in_fp8(self) -> bool:
        """Whether any layer multiplies fp8 by fp8, which matrix units of GPUs do."""
        return any(each.weights == "fp8" and not each.block and not each.plain_activations for each in self.all)

    @property
    def widened(self) -> bool:
        """Whether a GPU makes any layer's weights plain for each product of many rows, experts aside."""
        in_fp8 = (bool(each.block) or each.plain_activations for each in self.all if each.weights == "fp8")
        others = (each.weights == "int8" or (each.weights in FOUR_BITS and not each.in_blocks) for each in self.all)
        return any(in_fp8) or any(others)

    def of(self, name: str) -> QuantizationSpec | None:
        """Return what a module of the checkpoint is held by, None where it stays plain."""
        names = tuple(self._in_lists(name))
        if any(map(naming(self.ignore), names)):
            return None
        found = self._that_fits(names)
        return None if found is None or found.weights == PLAIN else found

    def _that_fits(self, names: Sequence[str]) -> QuantizationSpec | None:
        for part in (part for each in names for part in within(each)):  # the nearest that is named
            if (found := next((spec for spec in self.all if part in spec.named), None)) is not None:
                return found
        for spec in self.all:
            if any(target != LINEAR and fits(each, target) for target in spec.targets for each in names):
                return spec
        return next((spec for spec in self.all if LINEAR in spec.targets), None)

    def _in_lists(self, name: str) -> Iterator[str]:
        """Yield what lists may call a module of the checkpoint."""
        yield name
        for outer, inner in self.prefixes:
            if f"{name}.".startswith(inner):
                yield (outer + f"{name}.".removeprefix(inner))[:-1]


@lru_cache(maxsize=16)
def naming(entries: tuple[str, ...]) -> Callable[[str], bool]:
    """Return what tells whether a list of modules names one, or one that it is part of.

    Lists have hundreds of entries, and models tens of thousands of experts' layers.
    """
    literal = frozenset(entry for entry in entries if "*" not in entry and not entry.startswith("re:"))
    expressions = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    patterns = [translate(entry) for entry in entries if "*" in entry and not entry.startswith("re:")]
    any_pattern = re.compile("|".join(patterns)) if patterns else None

    @lru_cache(maxsize=1024)  # many layers are part of the same ones
    def fits_pattern(part: str) -> bool:
        return any_pattern is not None and any_pattern.match(part) is not None

    def named(name: str) -> bool:
        if any(expression.match(name) for expression in expressions) or any(map(fits_pattern, within(name))):
            return True
        parts = name.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[first:end]) in literal for end in ends for first in range(end))

    return named


def within(name: str) -> Iterator[str]:
    """Yield a module's name, and those of the ones that it is part of, from the inside out."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def fits(name: str, pattern: str) -> bool:
    """Whether a module has this name; pattern: "re:" and the beginning's regular expression, or with *, or whole."""
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    return fnmatchcase(name, pattern)


@lru_cache(maxsize=1 << 14)  # that of `re` keeps 512, and a list may have an expression for each layer
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def names_in(found: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """Return the first of the lists of names that is there. Raises `CheckpointError` for what is no such list."""
    names: Any = next((found[field] for field in fields if found.get(field)), [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{FIELD}: {' or '.join(fields)} must list names of modules, not {names!r}")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise CheckpointError(f"{FIELD}: {name!r} is no regular expression: {error}") from None
    return tuple(names)


def group_in(value: Any, field: str = "group_size") -> int:
    """Return the inputs of a group, 0 = all. Raises `CheckpointError` for what is no number of them."""
    if value in (None, -1):
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 8:
        raise CheckpointError(f"{FIELD}.{field} must be a multiple of 8, such as 32, 64 or 128, or -1, not {value!r}")
    return value


def by_group(group: int) -> tuple[int, int] | None:
    """Return the block of eight bits by groups of inputs. group: 0 = all inputs: each output has one scale."""
    return (1, group) if group else None


def refuse(what: str) -> NoReturn:
    """Raise `CheckpointError` naming what is not implemented, and what is."""
    raise CheckpointError(f"{FIELD}{what} is not supported; {SERVED}")
