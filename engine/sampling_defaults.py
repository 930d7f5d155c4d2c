"""Sampling parameters that a request leaves open, as the model's generation_config.json and the settings say them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.loader.checkpoint import read_json
from engine.sampling_params import SamplingParams

AUTO, NEUTRAL = "auto", "vllm"  # of `generation_config`, which may be a folder, too
FILE = "generation_config.json"
MAX_NEW_TOKENS = "max_new_tokens"  # transformers' name of `max_tokens`
# Source: the fields that vLLM takes from the file.
FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    MAX_NEW_TOKENS,
)


def sampling_defaults(folder: Path, where: str = AUTO, override: str | None = None) -> dict[str, float]:
    """Return fields of `SamplingParams` and their values. folder: of the model.

    where, override: `generation_config`, and `override_generation_config`, the text of a JSON object.

    Raises `CheckpointError` for a file that cannot be read, and `ConfigError` naming the setting for a value that no
    request may have either.
    """
    said = _said(folder, where)
    overriding = json.loads(override or "{}")
    unknown = next((name for name in overriding if name not in FIELDS), None)
    if unknown is not None:
        name = "override_generation_config"
        raise ConfigError(f"{name}: {unknown} is no sampling parameter; known: {', '.join(FIELDS)}", name)
    found = {name: value for name, value in {**said, **overriding}.items() if name in FIELDS and value is not None}
    defaults = {"max_tokens" if name == MAX_NEW_TOKENS else name: value for name, value in found.items()}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        name = "override_generation_config" if error.param in overriding else "generation_config"
        raise ConfigError(f"{name}: {error}; correct it with override_generation_config", name) from error
    return defaults


def _said(folder: Path, where: str) -> dict[str, Any]:
    if where == NEUTRAL:
        return {}
    if where == AUTO:
        return read_json(folder / FILE) if (folder / FILE).is_file() else {}
    try:
        return read_json(Path(where).expanduser() / FILE)
    except CheckpointError as error:
        raise ConfigError(
            f"generation_config must be {AUTO}, {NEUTRAL} or a folder with {FILE}: {error}", "generation_config"
        ) from error
