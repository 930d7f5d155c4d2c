"""A checkpoint's config, read and understood before any weight is. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.loader.checkpoint import HUB_FILES, find_checkpoint, read_json
from engine.models.hf_config import known_token_ids
from engine.models.registry import Architecture, architecture_of
from engine.models.spec import DecoderSpec
from parallel.sharding import divide, qkv_pieces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint whose config has been read and understood; no weight has been loaded.

    phases: seconds by phase that its files took so far.
    """

    path: Path
    architecture: Architecture
    spec: DecoderSpec
    phases: Mapping[str, float] = field(default_factory=dict)


def open_model(model: str, files: Sequence[str] = HUB_FILES) -> ModelFolder:
    """Find a checkpoint (folder or hub id) and read its spec. files: what of it is wanted from the hub.

    Code that a checkpoint brings along (`auto_map`) is never run. Raises `CheckpointError`.
    """
    path = find_checkpoint(model, files)
    config = read_json(path / "config.json")
    if config.get("auto_map"):
        logger.warning("%s brings its own code (auto_map), which is ignored", path)
    architecture, spec = architecture_of(config)
    _check(spec)
    generation = path / "generation_config.json"
    if generation.is_file():
        more = known_token_ids(read_json(generation).get("eos_token_id"), spec.vocab_size)
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))
    return ModelFolder(path, architecture, spec)


def check_sharding(spec: DecoderSpec, size: int) -> None:
    """Raise `ShardingError` when the model cannot be split over `size` ranks."""
    qkv_pieces(spec.num_heads, spec.num_kv_heads, spec.head_dim, 0, size)
    divide(spec.intermediate_size, size, "intermediate_size")


def _check(spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {spec.num_heads} is not a multiple of "
            f"num_key_value_heads = {spec.num_kv_heads}"
        )
