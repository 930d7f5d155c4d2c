"""Reads the `quantization_config` of compressed-tensors, as llm-compressor writes it. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.quantization.spec import FIELD, QuantizationSpec, by_group, group_in, names_in, refuse

logger = logging.getLogger(__name__)

STATIC = "the checkpoint's scales of activations are not used: each token gets its own, which is finer, or none"
WHERE = ".config_groups: "
# By kind and bits of weights; "" is what each group may leave out, for the format of the whole.
FORMATS: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("int", 8): ("int-quantized", "naive-quantized", "pack-quantized"),
    ("int", 4): ("pack-quantized",),
    ("float", 4): ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
}
STRATEGIES: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("float", 8): ("channel", "tensor", "block"),
    ("int", 8): ("channel", "tensor", "group"),
    ("int", 4): ("group", "channel"),
    ("float", 4): ("tensor_group", "group"),
}
GROUPS = {"nvfp4": 16, "mxfp4": 32}
REORDERED = ("group", "dynamic")
IN_ORDER = (None, False, "weight", "static")


def read_compressed_tensors(found: Mapping[str, Any]) -> QuantizationSpec:
    """Return how the layers are stored. Raises `CheckpointError` naming what is not served."""
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse(".config_groups: no group of layers")
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise CheckpointError(f"{FIELD}.sparsity_config must be an object, not {sparsity!r}")
    if sparsity.get("format", "dense") != "dense":
        refuse(f".sparsity_config.format = {sparsity['format']!r}: sparse weights")
    ignore = names_in(found, "ignore")
    first, *others = (_group(group, found.get("format"), ignore) for group in groups.values())
    return replace(first, others=tuple(others))


def _group(group: Any, layout: Any, ignore: tuple[str, ...]) -> QuantizationSpec:
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        refuse(f"{WHERE}no weights are quantised")
    bits = weights.get("num_bits", 8)
    kind = (str(weights.get("type", "int")), bits if isinstance(bits, int) else 0)
    if kind not in FORMATS:
        refuse(f"{WHERE}weights of {bits} bits, {kind[0]}")
    layout = group.get("format") or layout
    if layout not in FORMATS[kind]:
        refuse(f".format = {layout!r} of {kind[0]} weights of {kind[1]} bits")
    _check_weights(weights, kind)
    _check_activations(group)
    targets = names_in(group, "targets")
    if not targets:
        refuse(f"{WHERE}no targets")
    if unknown := [name for name in targets if "." not in name and not name.startswith("re:") and name != "Linear"]:
        refuse(f'{WHERE}targets {", ".join(unknown)}: modules other than "Linear"')
    spec = QuantizationSpec("compressed-tensors", "", ignore=ignore, targets=targets)
    if kind == ("float", 8):
        plain = not group.get("input_activations")
        return replace(spec, weights="fp8", plain_activations=plain, block=_block(weights))
    if kind == ("int", 8):
        block = by_group(group_in(weights.get("group_size")))
        return replace(spec, weights="int8", packed=layout == "pack-quantized", block=block)
    if kind == ("float", 4):
        name = layout.removesuffix("-pack-quantized")
        if weights.get("group_size") != GROUPS[name]:
            refuse(f"{WHERE}{name.upper()} with group_size = {weights.get('group_size')!r}")
        return replace(spec, weights=name, layout=layout, group=GROUPS[name])
    return replace(
        spec,
        weights="int4",
        layout=layout,
        group=group_in(weights.get("group_size")),
        zeros=not weights.get("symmetric", True),
        reordered=weights.get("actorder") in REORDERED,
    )


def _check_weights(weights: Mapping[str, Any], kind: tuple[str, int]) -> None:
    strategy = str(weights.get("strategy") or "") or ("group" if group_in(weights.get("group_size")) else "tensor")
    grouped = "group" in strategy
    if strategy not in STRATEGIES[kind] or bool(group_in(weights.get("group_size"))) != grouped:
        refuse(f"{WHERE}{kind[0]} weights of {kind[1]} bits with a scale per {strategy}")
    if weights.get("dynamic"):
        refuse(f"{WHERE}weights that are dynamic")
    if not weights.get("symmetric", True) and kind != ("int", 4):
        refuse(f"{WHERE}asymmetric {kind[0]} weights of {kind[1]} bits")
    order = weights.get("actorder")
    if order not in (*IN_ORDER, *REORDERED) or (order in REORDERED and kind != ("int", 4)):
        refuse(f"{WHERE}actorder = {order!r} of {kind[0]} weights of {kind[1]} bits")


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    if weights.get("strategy") != "block":
        return None
    found = weights.get("block_structure")
    sizes = found.split("x") if isinstance(found, str) else found
    try:
        rows, columns = (int(size) for size in sizes or ())
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{FIELD}: block_structure must be two numbers, such as [128, 128], not {found!r}")
    return rows, columns


def _check_activations(group: Mapping[str, Any]) -> None:
    """Refuse activations of which it is not known that plain ones, or ones with a scale per token, are as good."""
    if group.get("output_activations"):
        refuse(f"{WHERE}quantised output_activations")
    found = group.get("input_activations")
    if not found:
        return
    if not isinstance(found, Mapping) or (found.get("type") == "float" and not found.get("symmetric", True)):
        refuse(f"{WHERE}asymmetric input_activations")
    if found.get("num_bits") not in (8, 4) or found.get("type") not in ("float", "int"):
        refuse(f"{WHERE}input_activations of {found.get('num_bits')} bits, {found.get('type')}")
    if found.get("strategy") not in ("token", "tensor", "group", "tensor_group"):
        refuse(f"{WHERE}input_activations with a scale per {found.get('strategy')}")
    if not found.get("dynamic"):
        logger.info(STATIC)
