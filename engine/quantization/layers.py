"""Quantised linear layers of a model: what flag and checkpoint come to, and how such weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.spec import DecoderSpec, QuantizationSpec
from engine.models.weight_map import WeightRule
from parallel.fp8 import LEAST_CAPABILITY, MULTIPLE
from parallel.linear import ParallelLinear
from parallel.quantise import FORMATS, quantise, store_as
from parallel.weight_source import WeightSource

# Not needed: scales of activations, which get their own per token; shapes, which config.json tells; query scales.
UNUSED = re.compile(r"\.(input_scale|weight_shape|q_scale)$")
IN_A_LAYER = re.compile(r"(layers\.\d+)\.(.+)\.weight")


def quantization_of(config: EngineConfig, spec: DecoderSpec) -> QuantizationSpec | None:
    """Return how the linear layers are held, None = as they are. Raises `ConfigError` for a contradiction."""
    asked, stored = config.quantization, spec.quantization
    if stored is not None:
        if asked not in (None, stored.method):
            raise ConfigError(
                f"quantization={asked}: the checkpoint is quantised already, by {stored.method}; leave the flag out, "
                "or give the unquantised checkpoint",
                "quantization",
            )
        return stored
    if asked == "compressed-tensors":
        raise ConfigError(
            "quantization=compressed-tensors: the checkpoint's config.json has no quantization_config; use fp8 or "
            "int8, which are made of plain weights as they are loaded",
            "quantization",
        )
    return None if asked is None else QuantizationSpec(asked, asked, stored=False)


def check_device(quantization: QuantizationSpec | None, device: str) -> None:
    """Raise `ConfigError` where the weights cannot be multiplied on `device`, which need not be in this machine."""
    if quantization is not None and quantization.weights == "fp8" and not device.startswith("cuda"):
        wanted = "the unquantised checkpoint with quantization=int8" if quantization.stored else "quantization=int8"
        raise ConfigError(f"quantization=fp8 needs a GPU; on device={device} use {wanted}", "quantization")


def check_capability(quantization: QuantizationSpec | None, device: str) -> None:
    """Raise `ConfigError` where this GPU has no matrix units for fp8."""
    if quantization is None or quantization.weights != "fp8" or not device.startswith("cuda"):
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        raise ConfigError(
            "quantization=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this one has "
            f"{found[0]}.{found[1]}; use quantization=int8",
            "quantization",
        )


class Layout:
    """Which parameters a decoder has and which tensors fill them, where some of its linear layers are quantised.

    weights: rules for all weights, filled as the plain ones are. scales: rules for scales, of (rows,) whatever the
    checkpoint's shape. Raises `CheckpointError` for a checkpoint whose merged layers are quantised in part.
    """

    def __init__(self, quantization: QuantizationSpec | None, rules: Iterable[WeightRule]) -> None:
        self._quantization = quantization
        self._form = None if quantization is None else FORMATS[quantization.weights]
        self.weights = list(rules)
        self.scales: list[WeightRule] = []
        self._quantised: set[str] = set()  # modules of the decoder
        if quantization is not None:
            self._quantised = _quantised_modules(self.weights, quantization)
            if quantization.stored:
                self.scales = [_scale_rule(rule) for rule in self.weights if self._holds(rule)]
            if quantization.packed:
                self.weights = [_packed_rule(rule) if self._holds(rule) else rule for rule in self.weights]

    def expects(self, name: str) -> bool:
        """Whether a tensor beside weights and scales belongs to the checkpoint."""
        return self._quantization is not None and self._quantization.stored and bool(UNUSED.search(name))

    def prepare(self, name: str, layer: nn.Module) -> None:
        """Give the linear layers inside decoder layer `name` what will be loaded, before they take memory."""
        for linear in self._linears(name, layer):
            if self._quantization is not None and not self._quantization.stored:
                linear.weight.vacate()
            else:
                self._store(linear)

    def outline(self, name: str, layer: nn.Module) -> None:
        """Give them what is there after loading; for a decoder that is only measured."""
        for linear in self._linears(name, layer):
            self._store(linear)

    def batches(self) -> Iterator[list[WeightRule]]:
        """Yield the weights' rules by what may be in memory unquantised at one time: a layer, or everything."""
        if self._quantization is None or self._quantization.stored:
            yield self.weights
        else:
            for _, batch in groupby(self.weights, lambda rule: _layer_of(rule.target)):
                yield list(batch)

    def finish(self, model: nn.Module, rules: Sequence[WeightRule]) -> None:
        """Bring the linear layers that `rules` have filled into their form; all ranks must call alike."""
        if self._quantization is None or self._form is None:
            return
        for name in dict.fromkeys(_module(rule.target) for rule in rules if self._holds(rule)):
            linear = model.get_submodule(name)
            if not isinstance(linear, ParallelLinear):
                raise TypeError(f"{name} is no linear layer")
            if not self._quantization.stored:
                quantise(linear, self._form)
            elif self._quantization.packed:  # numbers from -128 on are stored counted from 0
                linear.weight.data.view(torch.uint8).bitwise_xor_(128)

    def _holds(self, rule: WeightRule) -> bool:
        return rule.target.endswith(".weight") and _module(rule.target) in self._quantised

    def _linears(self, name: str, layer: nn.Module) -> Iterator[ParallelLinear]:
        for inner, module in layer.named_modules():
            if isinstance(module, ParallelLinear) and f"{name}.{inner}" in self._quantised:
                self._check_sizes(f"{name}.{inner}", module)
                yield module

    def _store(self, linear: ParallelLinear) -> None:
        if self._form is not None:
            store_as(linear, self._form)

    def _check_sizes(self, name: str, linear: ParallelLinear) -> None:
        rows, columns = linear.weight.shape
        if self._form is FORMATS["fp8"] and (rows % MULTIPLE or columns % MULTIPLE):
            raise ConfigError(
                f"quantization=fp8: {name} is [{rows}, {columns}] on each rank, and fp8 products want multiples of "
                f"{MULTIPLE}; use another tensor_parallel_size, or the unquantised checkpoint with quantization=int8",
                "quantization",
            )


class ScaleSource(WeightSource):
    """Scales on disk as one per row: from (rows, 1) or (rows,), or a single one for all."""

    def __init__(self, source: WeightSource, rows: int) -> None:
        self._scales = source[:].flatten()
        self._rows = rows

    def get_shape(self) -> Sequence[int]:
        """Return (rows,), or what is there where that is neither one nor as many."""
        return (self._rows if len(self._scales) == 1 else len(self._scales),)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self._scales.expand(self.get_shape()[0])[index]


def _quantised_modules(rules: Sequence[WeightRule], quantization: QuantizationSpec) -> set[str]:
    chosen: dict[str, bool] = {}
    for rule in rules:
        if len(rule.shape) != 2 or not IN_A_LAYER.fullmatch(rule.target):
            continue
        module, quantised = _module(rule.target), not _is_ignored(_module(rule.name), quantization.ignore)
        if quantised and quantization.stored and rule.transposed:
            raise CheckpointError(f"config.json: quantization_config of {rule.name}, a Conv1D, is not supported")
        if chosen.setdefault(module, quantised) != quantised:
            raise CheckpointError(
                f"config.json: quantization_config ignores {rule.name} or its neighbours in one product, not all of "
                "them; query, key and value are quantised together, and gate and up"
            )
    return {module for module, quantised in chosen.items() if quantised}


def _is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether `name` is on the list: by name, by a part of it between dots, or by "re:" and a regular expression."""
    return any(
        re.match(entry[3:], name) if entry.startswith("re:") else f".{entry}." in f".{name}." for entry in ignore
    )


def _scale_rule(rule: WeightRule) -> WeightRule:
    return WeightRule(f"{rule.name}_scale", f"{rule.target}_scale", rule.shape[:1], rule.part)


def _packed_rule(rule: WeightRule) -> WeightRule:
    return replace(rule, name=f"{rule.name}_packed", packed=True)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _layer_of(target: str) -> str:
    found = re.match(r"layers\.\d+", target)
    return found[0] if found else ""
