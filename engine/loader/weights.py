"""Loads the weights of a model, by the slices that this rank holds."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.loader.kv_scales import KV_SCALE
from engine.loader.model_folder import ModelFolder
from engine.loader.safetensors_file import Checkpoint, TensorOnDisk
from engine.loader.weight_reader import fill
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec, QuantizationSpec
from engine.models.weight_map import WeightRule
from engine.quantization.layers import Layout, ScaleSource
from parallel.group import Group
from parallel.parameter import ShardedParameter, Transfer

logger = logging.getLogger(__name__)

# Buffers that some checkpoints saved beside the weights.
NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
NAMES_SHOWN = 8


def load_model(
    folder: ModelFolder,
    spec: DecoderSpec,
    max_positions: int,
    group: Group,
    dtype: torch.dtype,
    quantization: QuantizationSpec | None = None,
) -> Decoder:
    """Build the decoder and fill this rank's shard of every parameter.

    spec: the folder's, possibly with settings resolved. quantization: of the linear layers, the checkpoint's or one
    that is made here, a layer at a time. Raises `CheckpointError` naming tensors and files,
    `ShardingError` before anything is read when the sizes cannot be split over the group.
    """
    layout = Layout(quantization, folder.architecture.weights(spec))
    model = Decoder(spec, max_positions, group, dtype, layout.prepare)
    model.requires_grad_(False)
    checkpoint = Checkpoint(folder.path)
    try:
        _load(model, layout, checkpoint, spec)
    finally:
        checkpoint.close()
    model.finish_loading()
    return model.eval()


def _load(model: Decoder, layout: Layout, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    names = _names_on_disk(checkpoint.names, layout.weights)
    wanted = {rule.name for rule in (*layout.weights, *layout.scales)}
    known = {"lm_head.weight"} if spec.tied_embeddings else set()
    others = names.keys() - wanted - known
    extra = {n for n in others if not (NO_WEIGHTS.search(n) or KV_SCALE.search(n) or layout.expects(n))}
    _refuse(checkpoint.folder, "missing", wanted - names.keys())
    _refuse(checkpoint.folder, "not part of this architecture", extra)
    began = time.perf_counter()
    num_bytes = 0
    for rules in layout.batches():
        num_bytes += _fill(model, rules, checkpoint, names)
        layout.finish(model, rules)
    for rule in layout.scales:
        _load_scale(model, rule, checkpoint, names[rule.name])
    seconds = max(time.perf_counter() - began, 1e-9)
    gigabytes = num_bytes / 1e9
    logger.info("weights: %.2f GB read in %.2f s, %.1f GB/s", gigabytes, seconds, gigabytes / seconds)


def _fill(model: Decoder, rules: list[WeightRule], checkpoint: Checkpoint, names: Mapping[str, str]) -> int:
    parameters = dict(model.named_parameters())
    reads = [read for rule in rules for read in _reads(parameters[rule.target], rule, checkpoint, names[rule.name])]
    num_bytes = fill(reads, model.group.device, model.group.size)
    for rule in rules:
        _sharded(parameters[rule.target], rule).mark_loaded(rule.part)
    return num_bytes


def _load_scale(model: Decoder, rule: WeightRule, checkpoint: Checkpoint, name: str) -> None:
    source = checkpoint.source(name)
    scales = ScaleSource(source, rule.shape[0])
    if tuple(scales.get_shape()) != rule.shape:
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}, and a scale for each of "
            f"{rule.shape[0]} rows or a single one is wanted"
        )
    _sharded(model.get_parameter(rule.target), rule).load(scales, rule.part)


def _reads(
    parameter: torch.nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, name: str
) -> list[tuple[TensorOnDisk, Transfer]]:
    """Return what is to be read for one rule, the tensor's shape being checked."""
    source = checkpoint.source(name)
    if rule.packed:
        source = source.as_bytes()
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
