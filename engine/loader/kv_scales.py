"""Reads the scales of an fp8 KV cache."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.loader.safetensors_file import Checkpoint
from engine.models.causal_lm import CausalLM
from parallel.group import Group
from parallel.sharding import kv_head_start, kv_heads_per_rank

logger = logging.getLogger(__name__)

# Mixers are those of Nemotron-H.
KV_SCALE = re.compile(r"(layers\.\d+)\.(?:self_attn|mixer)\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")


def read_kv_scales(folder: Path, model: CausalLM) -> tuple[Tensor | None, ...]:
    """Return this rank's scales of keys and values for each layer with a cache, [2, kv_heads] fp32.

    None for a layer of no attention, 1.0 where the checkpoint has none. A tensor holds one number for all KV heads of
    a layer or one for each. Raises `CheckpointError` for another shape and for a scale that is no positive number.
    """
    layers = dict(model.attention_paths())
    scales = {path: torch.ones(2, part.all_kv_heads) for path, part in layers.items()}
    checkpoint = Checkpoint(folder)
    try:
        found = [(name, match) for name in sorted(checkpoint.names) if (match := KV_SCALE.search(name))]
        for name, match in found:
            if match[1] not in layers:
                raise CheckpointError(f"{name}: the model has no attention layer {match[1]!r}; remove the tensor")
            scales[match[1]]["kv".index(match[2])] = _read(checkpoint, name, layers[match[1]].all_kv_heads)
    finally:
        checkpoint.close()
    if found:
        logger.info("fp8 KV cache: %d scales from the checkpoint", len(found))
    else:
        logger.warning(
            "fp8 KV cache: the checkpoint brings no k_scale and v_scale, so all are 1.0; "
            "keys and values beyond +-448 are cut off"
        )
    group = model.group
    own = {path: _own(scale, group).to(group.device) for path, scale in scales.items()}
    of_layer = {part.cache_index: own[path] for path, part in model.attention_paths()}
    return tuple(of_layer.get(index) for index in range(len(model.cached)))


def _own(scale: Tensor, group: Group) -> Tensor:
    """Return the scales of this rank's KV heads, of those of all: [2, kv_heads]."""
    heads = scale.shape[1]
    first = kv_head_start(heads, group.rank, group.size)
    return scale[:, first : first + kv_heads_per_rank(heads, group.size)].contiguous()


def _read(checkpoint: Checkpoint, name: str, heads: int) -> Tensor:
    source = checkpoint.source(name)
    scale = source[:].float().flatten()
    if len(scale) not in (1, heads):
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}; 1 number or {heads}, "
            "one for each KV head, is expected"
        )
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(f"{source.file.path}: tensor {name} holds a scale that is no positive number")
    return scale
