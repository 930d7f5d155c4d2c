"""Chooses how the linear layers of a model hold their weights and, once these are loaded, what multiplies by them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.kernels.base import Kernels
from engine.kernels.onednn import OneDNN, PackedLinear
from engine.kernels.product_choice import ProductChoice
from engine.layers.base import Names, checkpoint_names, is_transposed
from engine.quantization.config import QuantizationSpec
from engine.quantization.fp8 import LEAST_CAPABILITY, Fp8Linear
from engine.quantization.int8 import Int8Linear
from engine.quantization.method import QuantizedLinear
from parallel.linear import LinearMethod, ParallelLinear, PlainLinear

logger = logging.getLogger(__name__)

METHODS: Mapping[str, type[QuantizedLinear]] = {"fp8": Fp8Linear, "int8": Int8Linear}


def quantization_of(config: EngineConfig, stored: QuantizationSpec | None) -> QuantizationSpec | None:
    """Return how the linear layers are held, None = as they are. stored: in the checkpoint.

    Raises `ConfigError` for a contradiction.
    """
    asked = config.quantization
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


def quantize(layers: nn.Module, prefix: str, names: Names, quantization: QuantizationSpec | None) -> None:
    """Give the linear layers inside a model's `layers` the method that they are quantised by, before they are loaded.

    prefix: of the layers' paths in the model. names: empty where the layers are not ours.

    Raises `CheckpointError` for a checkpoint whose merged layers are quantised in part, `ConfigError` for layers and
    sizes that the method does not take.
    """
    if quantization is None:
        return
    if not names:
        raise ConfigError(
            f"quantization={quantization.method}: layers of the transformers library are not quantised here; leave "
            "the flag out and give an unquantised checkpoint, or use model_impl=native where there is a family",
            "quantization",
        )
    for path, linear in _linear_layers(layers, prefix):
        found = checkpoint_names(names, path)
        ignored = [_is_ignored(name, quantization.ignore) for name in found]
        if not all(ignored) and any(ignored):
            raise CheckpointError(
                f"config.json: quantization_config ignores {found[ignored.index(True)]} or its neighbours in one "
                "product, not all of them; query, key and value are quantised together, and gate and up"
            )
        if ignored[0]:
            continue
        if quantization.stored and is_transposed(names, path):
            raise CheckpointError(f"config.json: quantization_config of {found[0]}, a Conv1D, is not supported")
        linear.method = METHODS[quantization.weights](quantization)
        linear.method.create(linear, path)


def choose_products(model: nn.Module, kernels: Kernels) -> None:
    """Let each linear layer multiply by the best that there is for its weight, and free weights that this replaces.

    Call once, after the weights are loaded and torch's thread count is set. On a CPU plain weights are packed: by
    `kernels` or for oneDNN, whichever is faster for the shape on this machine. torch's plain products are for what
    neither can pack: in them a row's bits depend on how many there are.
    """
    owners = Counter(id(weight) for part in model.modules() for weight in part._parameters.values())
    packing = _Packing(kernels)
    linear = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    for layer in linear:
        weight, method = layer.weight, layer.method
        if isinstance(method, QuantizedLinear):
            method.use_kernels(layer, kernels)
        elif isinstance(method, PlainLinear) and weight.device.type == "cpu":
            packed = packing.of(weight)
            if packed is not None:
                layer.method = packed
                # An embedding tied to an output head still looks its rows up in the plain weight.
                if owners[id(weight)] == 1:
                    layer.release_weight()
    if linear:
        methods = Counter(type(layer.method).__name__ for layer in linear)
        logger.info("products: %s", ", ".join(f"{count} by {name}" for name, count in sorted(methods.items())))


class _Packing:
    """Packs plain weights on a CPU, each in the way that is the fastest for its shape."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._one_dnn = OneDNN()
        self._choices: dict[torch.dtype, ProductChoice] = {}

    def of(self, weight: Tensor) -> LinearMethod | None:
        """Return what multiplies by `weight`, None where it cannot be packed."""
        ours = self._kernels.linear(weight)
        if ours is None or not PackedLinear.supports(weight):
            return ours or self._one_dnn.pack(weight)
        choice = self._choices.setdefault(weight.dtype, ProductChoice(weight.dtype))
        # PackedLinear alone takes as long as oneDNN does: less than what keeps a row's bits from depending on others.
        ways = {"ours": self._kernels.linear, "oneDNN": PackedLinear}
        return ours if choice.fastest(weight, ways) == "ours" else self._one_dnn.pack(weight)


def _linear_layers(layers: nn.Module, prefix: str) -> Iterator[tuple[str, ParallelLinear]]:
    for inner, module in layers.named_modules():
        if isinstance(module, ParallelLinear) and module.quantized:
            yield f"{prefix}.{inner}", module


def _is_ignored(name: str, ignore: Iterable[str]) -> bool:
    """Whether `name` is on the list: by name, by a part of it between dots, or by "re:" and a regular expression."""
    return any(
        re.match(entry[3:], name) if entry.startswith("re:") else f".{entry}." in f".{name}." for entry in ignore
    )
