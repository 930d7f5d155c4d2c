"""Chooses how the layers of a model hold their weights and, once these are loaded, what multiplies by them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from engine.config import USUAL_GROUP, EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.kernels.base import Kernels
from engine.kernels.onednn import OneDNN, PackedLinear
from engine.kernels.product_choice import ProductChoice
from engine.layers.base import Names, checkpoint_names, is_stacked, is_transposed
from engine.layers.embedding import ParallelLMHead
from engine.layers.mla import HeadProducts
from engine.quantization.block_linear import BlockLinear
from engine.quantization.eight_bits import plain_eight_bits
from engine.quantization.four_bits import FourBitLinear, plain_four_bits
from engine.quantization.fp8 import LEAST_CAPABILITY, Fp8Linear
from engine.quantization.fp8_weight import Fp8WeightLinear
from engine.quantization.int8 import Int8Linear
from engine.quantization.made_int4 import MadeInt4Linear
from engine.quantization.method import ChannelLinear, QuantizedLinear
from engine.quantization.spec import FOUR_BITS, QuantizationSpec
from engine.quantization.widened import MadePlain
from parallel.linear import LinearMethod, ParallelLinear, PlainLinear

logger = logging.getLogger(__name__)

# With a scale for each output, by what flags call them.
METHODS: Mapping[str, type[ChannelLinear]] = {"fp8": Fp8Linear, "int8": Int8Linear}
MADE_AT_LOAD = (*METHODS, "int4")
# How plain weights are made of quantised ones.
MADE_PLAIN = {"fp8": plain_eight_bits, "int8": plain_eight_bits, **dict.fromkeys(FOUR_BITS, plain_four_bits)}


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
        return _with_plain_activations(stored) if config.device == "cpu" else stored
    if asked is not None and asked not in MADE_AT_LOAD:
        raise ConfigError(
            f"quantization={asked}: the checkpoint's config.json has no quantization_config; use fp8, int8 or "
            "int4, which are made of plain weights as they are loaded",
            "quantization",
        )
    return None if asked is None else made_at_load(asked, config.quantization_group_size)


def made_at_load(method: str, group: int | None = None) -> QuantizationSpec:
    """Return how weights are held that are made of plain ones. group: `quantization_group_size`."""
    if method == "int4":
        return QuantizationSpec(method, method, False, layout="pack-quantized", group=group or USUAL_GROUP)
    return QuantizationSpec(method, method, stored=False)


def _with_plain_activations(spec: QuantizationSpec) -> QuantizationSpec:
    """Return the spec for a device that has no units for fp8."""
    return replace(spec, plain_activations=True, others=tuple(map(_with_plain_activations, spec.others)))


def check_device(quantization: QuantizationSpec | None, device: str) -> None:
    """Raise `ConfigError` where the weights cannot be multiplied on `device`, which need not be in this machine."""
    made = quantization is not None and not quantization.stored
    if quantization is not None and made and quantization.in_fp8 and not device.startswith("cuda"):
        raise ConfigError(f"quantization=fp8 needs a GPU; on device={device} use quantization=int8", "quantization")


def check_capability(quantization: QuantizationSpec | None, device: str) -> None:
    """Raise `ConfigError` where this GPU has no matrix units for fp8."""
    if quantization is None or not quantization.in_fp8 or not device.startswith("cuda"):
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

    prefix: of the layers' paths in the model.

    Raises `CheckpointError` for a checkpoint whose merged layers are quantised in part, `ConfigError` for layers and
    sizes that the method does not take.
    """
    if quantization is None:
        return
    plain: Counter[str] = Counter()
    for path, layer in quantized_layers(layers, prefix):
        found = checkpoint_names(names, path)
        specs = [spec and spec.form for spec in map(quantization.of, found)]
        if any(spec != specs[0] for spec in specs):
            raise CheckpointError(
                f"config.json: quantization_config ignores {found[specs.index(None)]} or its neighbours in one "
                "product, not all of them; query, key and value are quantised together, and gate and up"
                if None in specs
                else f"config.json: quantization_config holds {' and '.join(found)} in unlike ways, and they are one "
                "product here"
            )
        if (spec := specs[0]) is None:
            continue
        if spec.in_blocks and not is_stacked(names, path):
            raise CheckpointError(
                f"config.json: quantization_config of {found[0]}: mxfp4 is for experts in one tensor, as in gpt-oss"
            )
        if spec.stored and not spec.in_blocks and (is_transposed(names, path) or is_stacked(names, path)):
            kind = "experts in one tensor" if is_stacked(names, path) else "a Conv1D"
            raise CheckpointError(f"config.json: quantization_config of {found[0]}, {kind}, is not supported")
        if isinstance(layer, ParallelLinear):
            layer.method = _method_of(spec)
            layer.method.create(layer, path)
        elif spec.stored:
            layer.holding = MadePlain(layer.weight, partial(MADE_PLAIN[spec.weights], spec))
            plain.update([spec.weights])
    if plain and not _are_outlines(layers):
        counts = ", ".join(f"{count} layers in {weights}" for weights, count in sorted(plain.items()))
        logger.info("quantised in the checkpoint, made plain as they are loaded: %s", counts)


def quantize_head(head: ParallelLMHead, name: str, quantization: QuantizationSpec, on_disk: Collection[str]) -> None:
    """Have an output head that a checkpoint holds quantised made plain as it is loaded.

    name: of the head there. on_disk: names of all tensors: few configs say that the head is plain where it is.
    """
    spec = quantization.of(name)
    plain = {f"{name}.weight", f"{name}.bias"}
    if spec is not None and any(each.startswith(f"{name}.") and each not in plain for each in on_disk):
        head.method = MadePlain(head.weight, partial(MADE_PLAIN[spec.weights], spec))
        logger.info("output head quantised in the checkpoint, made plain as it is loaded: %s", spec.weights)


def _method_of(spec: QuantizationSpec) -> LinearMethod:
    """Return the method of a layer that is not loaded yet."""
    if spec.weights in FOUR_BITS:
        return FourBitLinear(spec) if spec.stored else MadeInt4Linear(spec)
    if spec.block is not None:
        return BlockLinear(spec)
    if spec.weights == "fp8" and spec.plain_activations:
        return Fp8WeightLinear(spec)
    return METHODS[spec.weights](spec)


def _are_outlines(layers: nn.Module) -> bool:
    """Whether the layers are on torch's device `meta`, and nothing will be loaded."""
    return any(parameter.is_meta for parameter in layers.parameters())


def hold_in_int8(head: ParallelLMHead) -> None:
    """Let a loaded output head multiply by its weight in int8; an embedding that it is tied to stays plain."""
    method = Int8Linear(made_at_load("int8"))
    method.load(head)
    head.method = method


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
            method.use_kernels(layer, kernels, packing.usual)
        elif isinstance(method, PlainLinear) and weight.device.type == "cpu":
            packed = packing.of(weight)
            if packed is not None:
                layer.method = packed
                # An embedding tied to an output head still looks its rows up in the plain weight.
                if owners[id(weight)] == 1:
                    layer.release_weight()
    if linear:
        slow = Counter(
            layer.method.describe()
            for layer in linear
            if isinstance(layer.method, QuantizedLinear) and layer.method.widens
        )
        if slow:
            logger.warning(
                "made plain for each product, which is slow: %s",
                ", ".join(f"{count} of {form}" for form, count in sorted(slow.items())),
            )
        methods = Counter(type(layer.method).__name__ for layer in linear)
        logger.info("products: %s", ", ".join(f"{count} by {name}" for name, count in sorted(methods.items())))


class _Packing:
    """Packs plain weights on a CPU, each in the way that is the fastest for its shape."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._one_dnn = OneDNN()
        self._choices: dict[torch.dtype, ProductChoice] = {}

    def usual(self, weight: Tensor) -> LinearMethod:
        """Return what multiplies by `weight` wherever it can be packed, for products of which none is measured."""
        if weight.device.type != "cpu":
            return PlainLinear(weight)
        return self._kernels.linear(weight) or self._one_dnn.pack(weight) or PlainLinear(weight)

    def of(self, weight: Tensor) -> LinearMethod | None:
        """Return what multiplies by `weight`, None where it cannot be packed."""
        ours = self._kernels.linear(weight)
        if ours is None or not PackedLinear.supports(weight):
            return ours or self._one_dnn.pack(weight)
        choice = self._choices.setdefault(weight.dtype, ProductChoice(weight.dtype))
        # PackedLinear alone takes as long as oneDNN does: less than what keeps a row's bits from depending on others.
        ways = {"ours": self._kernels.linear, "oneDNN": PackedLinear}
        return ours if choice.fastest(weight, ways) == "ours" else self._one_dnn.pack(weight)


def quantized_layers(layers: nn.Module, prefix: str) -> Iterator[tuple[str, ParallelLinear | HeadProducts]]:
    """Yield the layers that methods take, with their paths in the model. prefix: of `layers` there."""
    for inner, module in layers.named_modules():
        if (isinstance(module, ParallelLinear) and module.quantized) or isinstance(module, HeadProducts):
            yield f"{prefix}.{inner}", module
