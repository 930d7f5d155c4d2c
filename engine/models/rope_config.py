"""Reads how a config.json wants positions rotated, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError, UnsupportedFieldError
from engine.layers.rope import RopeSpec
from engine.models.config import HFConfig, positive

logger = logging.getLogger(__name__)

WHERE = "config.json: rope_parameters"
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SAME_AS_LONGROPE = ("su",)  # Phi-3's first name of it


def read_rope(
    hf: HFConfig,
    head_dim: int,
    max_positions: int,
    layer_type: str | None = None,
    *,
    theta: float = 10000.0,
    fraction: float | None = None,
    default: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Return the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    max_positions: tokens of the longest sequence that will be run; ropes whose angles change with the length of a
    sequence are held to what it allows. layer_type: whose settings are read where there are some for each type of
    layer. theta, fraction: the base, and the part of a head that is rotated, where the file says nothing. fraction:
    None = transformers' class of the family rotates all of a head in the default rope, whatever the file says.
    default: all settings, where it has none.
    """
    scaling = rope_settings(hf, layer_type, default)
    scaling.setdefault("rope_theta", hf.get("rope_theta", theta))
    scaling.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor", fraction))
    whole = fraction is None and scaling.get("rope_type", scaling.get("type", "default")) == "default"
    fraction = positive(scaling, "partial_rotary_factor", 1.0, WHERE)
    if whole and fraction != 1.0:
        raise UnsupportedFieldError(
            f"config.json: partial_rotary_factor = {fraction} is not supported here, only 1.0"
        )
    rotated = int(head_dim * fraction)
    if rotated % 2 or head_dim % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {fraction} of head_dim {head_dim} is not an even number of features"
        )
    spec = _rope_spec(scaling, hf, rotated, max_positions)
    return spec if rotated == head_dim else replace(spec, rotated=rotated)


def is_nested(hf: HFConfig) -> bool:
    """Whether there are settings for each type of layer."""
    given = hf.get("rope_parameters")
    return isinstance(given, Mapping) and any(isinstance(value, Mapping) for value in given.values())


def rope_settings(
    hf: HFConfig, layer_type: str | None = None, default: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return `rope_parameters` or `rope_scaling` as they are, those of `layer_type` where they differ by it.

    default: where the file has neither.
    """
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(name) or default or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {given!r}")
    if is_nested(hf):
        if layer_type is None:
            raise UnsupportedFieldError(
                f"config.json: {name} differing per layer type is not supported for this family"
            )
        given = given.get(layer_type) or {}
    return {key: value for key, value in given.items() if value is not None}


def _rope_spec(scaling: Mapping[str, Any], hf: HFConfig, rotated: int, max_positions: int) -> RopeSpec:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind in SAME_AS_LONGROPE else kind
    theta = positive(scaling, "rope_theta", 10000.0, WHERE)
    trained = hf.integer("max_position_embeddings", 2048)
    original = hf.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings", trained))
    original = int(
        positive({"original_max_position_embeddings": original}, "original_max_position_embeddings", None, WHERE)
    )
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", positive(scaling, "factor", None, WHERE))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            positive(scaling, "factor", None, WHERE),
            positive(scaling, "low_freq_factor", None, WHERE),
            positive(scaling, "high_freq_factor", None, WHERE),
            original,
        )
    if kind == "yarn":
        return _yarn(scaling, theta, trained, original)
    if kind == "longrope":
        return _longrope(scaling, theta, trained, original, rotated, max_positions)
    if kind == "dynamic":
        if max_positions > trained:
            raise CheckpointError(
                f"{WHERE}: rope_type 'dynamic' rotates by the length of the sequence beyond {trained} tokens, so "
                f"that cached tokens would change; set max_model_len to {trained}, or rope_type to yarn"
            )
        return RopeSpec(theta)  # which it is up to there
    raise UnsupportedFieldError(f"{WHERE}: rope_type {kind!r} is not supported; known: {', '.join(KINDS)}")


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return by what YaRN multiplies cosines and sines, or their product; section 3.4 of arXiv 2309.00071."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(scaling: Mapping[str, Any], theta: float, trained: int, original: int) -> RopeSpec:
    factor = positive(scaling, "factor", trained / original, WHERE)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = yarn_scale(factor)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            some, all_dims = (positive(scaling, name, None, WHERE) for name in ("mscale", "mscale_all_dim"))
            attention = yarn_scale(factor, some) / yarn_scale(factor, all_dims)
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"{WHERE}: truncate must be true or false, not {truncate!r}")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        positive(scaling, "beta_slow", 1.0, WHERE),
        positive(scaling, "beta_fast", 32.0, WHERE),
        original,
        truncate,
        attention_factor=positive({"attention_factor": attention}, "attention_factor", None, WHERE),
    )


def _longrope(
    scaling: Mapping[str, Any], theta: float, trained: int, original: int, rotated: int, max_positions: int
) -> RopeSpec:
    """LongRoPE has angles for sequences within the original length and others for longer ones.

    Keys in the cache have one of both. As in vLLM the longest sequence that will be run decides for all.
    """
    long = max_positions > original
    if long:
        logger.info(
            "longrope: max_model_len %d is beyond the original %d tokens: all sequences are rotated by long_factor; "
            "max_model_len=%d gives short ones the angles that they were trained with",
            max_positions,
            original,
            original,
        )
    name = "long_factor" if long else "short_factor"
    factors = scaling.get(name)
    if not isinstance(factors, Sequence) or len(factors) != rotated // 2:
        raise CheckpointError(f"{WHERE}: {name} must list {rotated // 2} numbers")
    factor = positive(scaling, "factor", trained / original, WHERE)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeSpec(
        theta,
        "longrope",
        factors=tuple(positive({name: value}, name, None, WHERE) for value in factors),
        attention_factor=positive({"attention_factor": attention}, "attention_factor", None, WHERE),
    )
