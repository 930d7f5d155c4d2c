"""What `--hf-overrides` makes of a config.json, in whichever of transformers' spellings either is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError

HALVES = ("text_config", "llm_config")  # configs within config.json
ROPE, SCALING = "rope_parameters", "rope_scaling"
BESIDE = ("rope_theta", "partial_rotary_factor")  # are in `rope_parameters` since transformers 5, before beside them
OF_ROPE = (ROPE, SCALING, *BESIDE)


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values. Those of a text half are changed one by one, others as a whole.

    What only a text half has can be given without its name. Settings of the rope count in either spelling:
    transformers 4 wrote `rope_scaling` and `rope_theta`, which nobody reads beside the `rope_parameters` of
    transformers 5. The base stays the file's where none is given.

    Raises `CheckpointError` where the file has settings for each type of layer, and it is not said which are meant.
    """
    found = {**values, **overrides}
    for half in HALVES:
        inner, given = values.get(half), overrides.get(half, {})
        if isinstance(inner, Mapping) and isinstance(given, Mapping):
            told = {name: value for name, value in overrides.items() if name not in values and _has(inner, name)}
            found[half] = overridden(inner, {**told, **given})
    before = values.get(ROPE)
    if isinstance(before, Mapping) and before and not overrides.keys().isdisjoint(OF_ROPE):
        found[ROPE] = _rope(before, overrides)
    return found


def _has(values: Mapping[str, Any], name: str) -> bool:
    return name in values or (name in OF_ROPE and ROPE in values)


def _rope(before: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return `rope_parameters` that were `before`."""
    if any(isinstance(value, Mapping) for value in before.values()):
        if ROPE in overrides:
            return overrides[ROPE]
        raise CheckpointError(
            f"hf_overrides: config.json has {ROPE} for each type of layer ({', '.join(before)}); "
            f"override {ROPE} as a whole"
        )
    name = ROPE if ROPE in overrides else SCALING
    scaling = overrides.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"hf_overrides: {name} must be an object, not {scaling!r}")
    replaced = ROPE in overrides or SCALING in overrides
    kept = {key: value for key, value in before.items() if key in BESIDE or not replaced}
    return {**kept, **scaling, **{key: overrides[key] for key in BESIDE if key in overrides}}
