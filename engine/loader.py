"""Loads the weights of a model, by the slices that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.model_folder import ModelFolder
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.models.weight_map import WeightRule
from parallel.group import Group
from parallel.parameter import ShardedParameter

# Buffers that some checkpoints saved beside the weights.
NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
NAMES_SHOWN = 8


def load_model(
    folder: ModelFolder, spec: DecoderSpec, max_positions: int, group: Group, dtype: torch.dtype
) -> Decoder:
    """Build the decoder and fill this rank's shard of every parameter.

    spec: the folder's, possibly with settings resolved. Raises `CheckpointError` naming tensors and files,
    `ShardingError` before anything is read when the sizes cannot be split over the group.
    """
    model = Decoder(spec, max_positions, group, dtype)
    model.requires_grad_(False)
    rules = list(folder.architecture.weights(spec))
    checkpoint = Checkpoint(folder.path)
    try:
        _load(model, rules, checkpoint, spec)
    finally:
        checkpoint.close()
    model.finish_loading()
    return model.eval()


def _load(model: Decoder, rules: list[WeightRule], checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    names = _names_on_disk(checkpoint.names, rules)
    wanted = {rule.name for rule in rules}
    known = {"lm_head.weight"} if spec.tied_embeddings else set()
    extra = {name for name in names.keys() - wanted - known if not NO_WEIGHTS.search(name)}
    _refuse(checkpoint.folder, "missing", wanted - names.keys())
    _refuse(checkpoint.folder, "not part of this architecture", extra)
    parameters = dict(model.named_parameters())
    for rule in rules:
        _load_one(parameters[rule.target], rule, checkpoint, names[rule.name])


def _load_one(parameter: torch.nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, name: str) -> None:
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{rule.target} is no parameter that can load itself")
    source = checkpoint.source(name)
    found = tuple(source.get_shape())
    where = checkpoint.file_of(name)
    if found != rule.shape:
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(found)}, config.json makes it {list(rule.shape)}"
        )
    try:
        parameter.load(source, rule.part, rule.transposed)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{where}: tensor {name} cannot be read: {error}") from error


def _names_on_disk(names: set[str], rules: list[WeightRule]) -> dict[str, str]:
    """Return name in the rules -> name on disk; some checkpoints were saved without the outer module's prefix."""
    prefix = rules[0].name.split(".")[0] + "."
    if any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    return {(name if name == "lm_head.weight" else prefix + name): name for name in names}


def _refuse(folder: Path, what: str, names: Iterable[str]) -> None:
    shown = sorted(names)
    if shown:
        more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
        raise CheckpointError(f"{folder}: tensors {what}: {', '.join(shown[:NAMES_SHOWN])}{more}")
