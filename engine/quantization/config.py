"""Reads config.json's `quantization_config`: which weights are stored how. What is not served is refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.quantization.compressed_tensors import STATIC, read_compressed_tensors
from engine.quantization.spec import (
    FIELD,
    GPTQ_LAYOUTS,
    PLAIN,
    QuantizationSpec,
    by_group,
    group_in,
    names_in,
    refuse,
)

logger = logging.getLogger(__name__)

GROUP_OF_NVFP4, GROUP_OF_MXFP4 = 16, 32
# AutoRound's packings, which are those of others.
PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq"}
PLAIN_BITS = 16
IN_EXPRESSIONS = frozenset("*+?^$()[]{}|\\")
# Of GPTQModel, of AutoRound's releases, and of compressed-tensors: Hadamard products of what goes into some layers.
ROTATIONS = ("rotation", "rotation_config", "hadamard_config", "transform_config")
# Before expressions in GPTQModel's `dynamic`: of modules that are plain, and, if it is there, of ones unlike others.
SKIP, OTHERWISE = "-:", "+:"


def read_quantization(values: Mapping[str, Any]) -> QuantizationSpec | None:
    """Return how the linear layers of a checkpoint are stored, None where they are plain.

    values: config.json. Raises `CheckpointError` naming the scheme and what is served instead.
    """
    found = values.get("quantization_config") or values.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{FIELD} must be an object, not {found!r}")
    rotated = next((field for field in ROTATIONS if found.get(field)), None)
    if rotated is not None:
        refuse(f".{rotated}: weights for activations that are transformed in each step")
    method = str(found.get("quant_method")).lower()
    readers = {
        "compressed-tensors": read_compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "modelopt_mixed": _modelopt,
    }
    if method in readers:
        return readers[method](found)
    if is_mxfp4(values):
        ignore = names_in(found, "modules_to_not_convert")
        return QuantizationSpec(
            "mxfp4", "mxfp4", ignore=ignore, layout="blocks", group=GROUP_OF_MXFP4, targets=("*.experts.*",)
        )
    return refuse(f".quant_method = {found.get('quant_method')!r}")


def is_mxfp4(values: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are stored in MXFP4."""
    found = values.get("quantization_config")
    return isinstance(found, Mapping) and str(found.get("quant_method")).lower() == "mxfp4"


def _fp8(found: Mapping[str, Any]) -> QuantizationSpec:
    """The layouts of AutoFP8 and vLLM, e4m3 and one `weight_scale` per tensor, and of DeepSeek, one per block.

    transformers, and with it Mistral, has other names for scales of tensors: they are read by the usual ones.
    """
    block = found.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    ):
        raise CheckpointError(f"{FIELD}.weight_block_size must be two numbers, such as [128, 128], not {block!r}")
    if found.get("fmt", "e4m3") != "e4m3":
        refuse(f".fmt = {found['fmt']!r}")
    if found.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        refuse(f".activation_scheme = {found['activation_scheme']!r}")
    if found.get("activation_scheme") == "static":
        logger.info(STATIC)
    return QuantizationSpec(
        "fp8",
        "fp8",
        ignore=names_in(found, "ignored_layers", "modules_to_not_convert"),
        block=(block[0], block[1]) if block else None,
        scale_name="weight_scale_inv" if block else "weight_scale",
    )


def _gptq(found: Mapping[str, Any]) -> QuantizationSpec:
    """The layouts of AutoGPTQ and GPTQModel, whose `dynamic` names layers unlike all others.

    optimum, and with it Qwen's models of experts, may list what is quantised by the ends of its names.
    """
    if found.get("modules_to_not_convert"):
        refuse(".modules_to_not_convert of GPTQ")
    overrides = found.get("dynamic") or {}
    if not isinstance(overrides, Mapping) or not all(
        name.startswith(SKIP) or isinstance(values, Mapping) for name, values in overrides.items()
    ):
        raise CheckpointError(f"{FIELD}.dynamic must map expressions to what they override, not {overrides!r}")
    usual = _gptq_layers(found)
    others = []  # in the order of the file: the first expression that fits a layer decides
    for name, values in overrides.items():
        skipped = name.startswith(SKIP)
        expression = name.removeprefix(SKIP if skipped else OTHERWISE)
        spec = replace(usual, weights=PLAIN) if skipped else _gptq_layers({**found, **values})
        others.append(replace(spec, targets=names_in({"dynamic": [f"re:{expression}"]}, "dynamic")))
    if ends := _ends_in(found, "modules_in_block_to_quantize"):
        # Behind the expressions, which decide first.
        listed = f"re:(?:.*\\.)?(?:{'|'.join(map(re.escape, ends))})$"
        return replace(usual, targets=(), others=(*others, replace(usual, targets=(listed,))))
    return replace(usual, others=tuple(others))


def _ends_in(found: Mapping[str, Any], field: str) -> list[str]:
    """Return the names in a list of names, or of lists of them, of products that are quantised one after another."""
    listed: Any = found.get(field) or []
    lists = [each if isinstance(each, list) else [each] for each in listed] if isinstance(listed, list) else [[None]]
    names: list[Any] = [name for each in lists for name in each]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f'{FIELD}.{field} must list names such as "self_attn.q_proj", not {listed!r}')
    return names


def _gptq_layers(found: Mapping[str, Any]) -> QuantizationSpec:
    """Layers in `checkpoint_format` gptq, whose zeros are one less, or gptq_v2."""
    bits = found.get("bits")
    if isinstance(bits, bool) or bits not in (4, 8):
        refuse(f".bits = {bits!r} of GPTQ")
    # Versions of GPTQModel write one of these, or both.
    said = {field: found[field] for field in ("checkpoint_format", "format") if found.get(field)}
    layout = next(iter(said.values()), "gptq")
    if any(value != layout for value in said.values()):
        raise CheckpointError(f"{FIELD}: checkpoint_format and format of GPTQ contradict each other: {said}")
    if layout not in GPTQ_LAYOUTS or found.get("is_marlin_format"):
        refuse(f".checkpoint_format = {'marlin' if found.get('is_marlin_format') else layout!r}")
    if found.get("pack_dtype", "int32") != "int32":
        refuse(f".pack_dtype = {found['pack_dtype']!r} of GPTQ")
    group = group_in(found.get("group_size"))
    reordered = bool(found.get("desc_act")) and group > 0  # one group has no order
    if bits == 4:
        return QuantizationSpec("gptq", "int4", layout=layout, group=group, reordered=reordered)
    if reordered:
        refuse(".desc_act = true of GPTQ in 8 bits by groups")
    if found.get("sym") is False:
        refuse(".sym = false of GPTQ in 8 bits")
    return QuantizationSpec("gptq", "int8", layout=layout, block=by_group(group))


def _awq(found: Mapping[str, Any]) -> QuantizationSpec:
    """The layout of AutoAWQ, version GEMM."""
    bits = found.get("bits", found.get("w_bit"))
    if bits != 4:
        refuse(f".bits = {bits!r} of AWQ")
    # AutoAWQ calls it version, GPTQModel one of the others.
    version = found.get("version") or found.get("checkpoint_format") or found.get("format") or "gemm"
    if str(version).lower() != "gemm":
        refuse(f".version = {version!r} of AWQ")
    if not found.get("zero_point", True):
        refuse(".zero_point = false of AWQ")
    group = group_in(found.get("group_size", found.get("q_group_size", 128)))
    ignore = names_in(found, "modules_to_not_convert")
    return QuantizationSpec("awq", "int4", ignore=ignore, layout="awq", group=group)


def _auto_round(found: Mapping[str, Any]) -> QuantizationSpec:
    """AutoRound, whose bits lie as those of GPTQ or AWQ; `extra_config` names layers unlike all others."""
    packing = found.get("packing_format")
    if not isinstance(packing, str) or packing not in PACKINGS:
        refuse(f".packing_format = {packing!r} of auto-round, other than {', '.join(PACKINGS)},")
    if found.get("data_type", "int") != "int":
        refuse(f".data_type = {found['data_type']!r} of auto-round")
    extra = found.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(said, Mapping) for said in extra.values()):
        raise CheckpointError(f"{FIELD}.extra_config must map layers to what they have, not {extra!r}")
    usual = {field: found[field] for field in ("bits", "group_size", "sym") if field in found}
    read = _awq
    if (layout := PACKINGS[packing]) in GPTQ_LAYOUTS:
        read, usual["checkpoint_format"] = _gptq_layers, layout
    whole = read(usual)
    ignore: list[str] = []
    named: dict[QuantizationSpec, set[str]] = {}
    expressions: list[QuantizationSpec] = []  # of those that fit a layer that is not named, the first decides
    for name, said in extra.items():
        own = usual | {field: said[field] for field in ("bits", "group_size", "sym") if field in said}
        plain = isinstance(own.get("bits"), int) and own["bits"] >= PLAIN_BITS
        spec = replace(whole, weights=PLAIN) if plain else read(own)
        if IN_EXPRESSIONS & {*name}:
            targets = names_in({"extra_config": [f"re:.*(?:{name})"]}, "extra_config")
            expressions.append(replace(spec, targets=targets))
        elif plain:
            ignore.append(name)
        else:
            named.setdefault(spec, set()).add(name)
    listed = (replace(spec, targets=(), named=frozenset(names)) for spec, names in named.items())
    return replace(whole, ignore=tuple(ignore), others=(*listed, *expressions))


def _modelopt(found: Mapping[str, Any]) -> QuantizationSpec:
    """The layouts of NVIDIA's Model Optimizer, whose fields may lie in an object called `quantization`."""
    inner = found.get("quantization", found)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{FIELD}.quantization must be an object, not {inner!r}")
    ignore = names_in(inner, "exclude_modules", "ignore")
    if inner.get("quant_algo") == "MIXED_PRECISION":
        return _mixed(inner.get("quantized_layers"), ignore)
    return replace(_algorithm(inner, "quant_algo"), ignore=ignore)


def _mixed(layers: Any, ignore: tuple[str, ...]) -> QuantizationSpec:
    """Each layer, or module of layers, by an algorithm of its own; what is not named is plain."""
    if not isinstance(layers, Mapping) or not all(isinstance(said, Mapping) for said in layers.values()):
        raise CheckpointError(f"{FIELD}.quantized_layers must map layers to algorithms, not {layers!r}")
    named: dict[QuantizationSpec, list[str]] = {}
    for name, said in layers.items():
        if said.get("quant_algo") in (None, "UNQUANTIZED"):
            ignore = (*ignore, name)
        elif not name.startswith("mtp."):  # these predict several tokens at once, and are not run
            named.setdefault(_algorithm(said, f"quantized_layers: {name}"), []).append(name)
    specs = [replace(spec, named=frozenset(names), targets=()) for spec, names in named.items()]
    if not specs:
        refuse(".quantized_layers without a layer")
    return replace(specs[0], ignore=ignore, others=tuple(specs[1:]))


def _algorithm(said: Mapping[str, Any], field: str) -> QuantizationSpec:
    """Return how layers are held by one algorithm of modelopt. field: where it stands."""
    algorithm = said.get("quant_algo")
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        logger.info(STATIC)
        return QuantizationSpec("modelopt", "fp8")
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        group = said.get("group_size")
        if group not in (None, GROUP_OF_NVFP4):
            refuse(f".group_size = {group!r} of NVFP4")
        return QuantizationSpec("modelopt", "nvfp4", layout="modelopt", group=GROUP_OF_NVFP4)
    return refuse(f".{field} = {algorithm!r} of modelopt")
