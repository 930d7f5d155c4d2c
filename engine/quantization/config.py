"""Reads config.json's `quantization_config`: which weights are stored how. What is not served is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.errors import CheckpointError

logger = logging.getLogger(__name__)

FIELD = "config.json: quantization_config"
SERVED = (
    "served are 8-bit weights with a scale per output channel or tensor: compressed-tensors' float-quantized, "
    "int-quantized and pack-quantized W8A16, and fp8 without weight_block_size. Or take the unquantised checkpoint "
    "with --quantization int8, or fp8 on a GPU"
)
STATIC = "the checkpoint's scales of activations are not used: each token gets its own, which is finer"
FORMATS = {
    "float": ("float-quantized", "naive-quantized"),
    "int": ("int-quantized", "naive-quantized", "pack-quantized"),
}


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How the linear layers inside a decoder's layers are held; embeddings and output head stay as they are.

    method: the name of `--quantization`. weights: "fp8" (e4m3, activations too) or "int8" (weights alone), with a
    scale per output channel. stored: in the checkpoint, else made as plain weights are loaded. ignore: modules that
    stay plain, by their names in the checkpoint, parts of these between dots, or "re:" and a regular expression.
    packed: four int8 in an int32 on disk, counted from -128.
    """

    method: str
    weights: str
    stored: bool = True
    ignore: tuple[str, ...] = ()
    packed: bool = False


def read_quantization(values: Mapping[str, Any]) -> QuantizationSpec | None:
    """Return how the linear layers of a checkpoint are stored, None where they are plain.

    values: config.json. Raises `CheckpointError` naming the scheme and what is served instead.
    """
    found = values.get("quantization_config") or values.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{FIELD} must be an object, not {found!r}")
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "fp8":
        return _fp8(found)
    if is_mxfp4(values):
        return None  # made plain as it is loaded, by the family that has such experts
    return _refuse(f".quant_method = {method!r}")


def is_mxfp4(values: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are stored in MXFP4."""
    found = values.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def _fp8(found: Mapping[str, Any]) -> QuantizationSpec:
    """The layout of AutoFP8 and vLLM: e4m3 and one `weight_scale` per tensor."""
    if found.get("weight_block_size"):
        _refuse(f".weight_block_size = {found['weight_block_size']!r}: fp8 with a scale per block")
    if found.get("fmt", "e4m3") != "e4m3":
        _refuse(f".fmt = {found['fmt']!r}")
    if found.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        _refuse(f".activation_scheme = {found['activation_scheme']!r}")
    if found.get("activation_scheme") == "static":
        logger.info(STATIC)
    return QuantizationSpec("fp8", "fp8", ignore=_names(found, "ignored_layers", "modules_to_not_convert"))


def _compressed_tensors(found: Mapping[str, Any]) -> QuantizationSpec:
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        _refuse(f".config_groups: {len(groups) if isinstance(groups, Mapping) else 'not one'} groups, one is served")
    group = next(iter(groups.values()))
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        _refuse('.config_groups: targets other than ["Linear"]')
    sparsity = found.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense" or found.get("transform_config"):
        _refuse(": sparse or transformed weights")
    kind = _weights(group.get("weights"))
    _activations(group, kind)
    layout = group.get("format") or found.get("format")
    if layout not in FORMATS[kind]:
        _refuse(f".format = {layout!r} of {kind} weights")
    return QuantizationSpec(
        "compressed-tensors",
        "fp8" if kind == "float" else "int8",
        ignore=_names(found, "ignore"),
        packed=layout == "pack-quantized",
    )


def _weights(weights: Any) -> str:
    """Return "float" or "int"."""
    if not isinstance(weights, Mapping):
        _refuse(".config_groups: no weights are quantised")
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind not in FORMATS or bits != 8:
        _refuse(f".config_groups: weights of {bits} bits, {kind}")
    if weights.get("strategy") not in ("channel", "tensor") or (weights.get("group_size") or -1) != -1:
        _refuse(f".config_groups: weights with a scale per {weights.get('strategy')}")
    if not weights.get("symmetric", True) or weights.get("dynamic") or weights.get("actorder"):
        _refuse(".config_groups: weights that are asymmetric, dynamic or reordered")
    return str(kind)


def _activations(group: Mapping[str, Any], kind: str) -> None:
    if group.get("output_activations"):
        _refuse(".config_groups: quantised output_activations")
    found = group.get("input_activations")
    if kind == "int":
        if found:
            _refuse(".config_groups: int8 activations (W8A8); int8 weights are served with plain activations (W8A16)")
        return
    if not isinstance(found, Mapping):
        _refuse(".config_groups: fp8 weights with plain activations (W8A16); both are in fp8 here (W8A8)")
    if found.get("type") != "float" or found.get("num_bits") != 8 or not found.get("symmetric", True):
        _refuse(f".config_groups: input_activations of {found.get('num_bits')} bits, {found.get('type')}")
    if found.get("strategy") not in ("token", "tensor"):
        _refuse(f".config_groups: input_activations with a scale per {found.get('strategy')}")
    if not found.get("dynamic"):
        logger.info(STATIC)


def _names(found: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    names: Any = next((found[field] for field in fields if found.get(field)), [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{FIELD}: {' or '.join(fields)} must list names of modules, not {names!r}")
    return tuple(names)


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"{FIELD}{what} is not supported; {SERVED}")
