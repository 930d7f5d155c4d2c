"""Loads the weights of a model, by the slices that this rank holds."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.kv_scales import KV_SCALE
from engine.model_folder import ModelFolder
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.models.weight_map import WeightRule
from engine.safetensors_file import Checkpoint, TensorOnDisk
from engine.weight_reader import fill
from parallel.group import Group
from parallel.parameter import ShardedParameter, Transfer

logger = logging.getLogger(__name__)

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
    extra = {name for name in names.keys() - wanted - known if not (NO_WEIGHTS.search(name) or KV_SCALE.search(name))}
    _refuse(checkpoint.folder, "missing", wanted - names.keys())
    _refuse(checkpoint.folder, "not part of this architecture", extra)
    parameters = dict(model.named_parameters())
    reads = [read for rule in rules for read in _reads(parameters[rule.target], rule, checkpoint, names[rule.name])]
    began = time.perf_counter()
    num_bytes = fill(reads, model.group.device, model.group.size)
    seconds = max(time.perf_counter() - began, 1e-9)
    for rule in rules:
        _sharded(parameters[rule.target], rule).mark_loaded(rule.part)
    gigabytes = num_bytes / 1e9
    logger.info("weights: %.2f GB read in %.2f s, %.1f GB/s", gigabytes, seconds, gigabytes / seconds)


def _reads(
    parameter: torch.nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, name: str
) -> list[tuple[TensorOnDisk, Transfer]]:
    """Return what is to be read for one rule, the tensor's shape being checked."""
    source = checkpoint.source(name)
    if source.shape != rule.shape:
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}, "
            f"config.json makes it {list(rule.shape)}"
        )
    transfers = _sharded(parameter, rule).transfers(source, rule.part, rule.transposed)
    return [(source, transfer) for transfer in transfers]


def _sharded(parameter: torch.nn.Parameter, rule: WeightRule) -> ShardedParameter:
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{rule.target} is no parameter that can load itself")
    return parameter


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
