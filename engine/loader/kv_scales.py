"""What an fp8 KV cache is scaled by: a checkpoint's k_scale and v_scale, by the names of vLLM and llm-compressor."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.loader.safetensors_file import Checkpoint
from engine.models.spec import DecoderSpec
from parallel.group import Group
from parallel.sharding import kv_head_start, kv_heads_per_rank

logger = logging.getLogger(__name__)

KV_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")


def read_kv_scales(folder: Path, spec: DecoderSpec, group: Group) -> Tensor:
    """Return this rank's scales of keys and values, [layers, 2, kv_heads] fp32: 1.0 where the checkpoint has none.

    A tensor holds one number for all KV heads of a layer or one for each. Raises `CheckpointError` for another shape
    and for a scale that is no positive number.
    """
    scales = torch.ones(spec.num_layers, 2, spec.num_kv_heads)
    checkpoint = Checkpoint(folder)
    try:
        found = [(name, match) for name in sorted(checkpoint.names) if (match := KV_SCALE.search(name))]
        for name, match in found:
            scales[int(match[1]), "kv".index(match[2])] = _read(checkpoint, name, spec)
    finally:
        checkpoint.close()
    if found:
        logger.info("fp8 KV cache: %d scales from the checkpoint", len(found))
    else:
        logger.warning(
            "fp8 KV cache: the checkpoint brings no k_scale and v_scale, so all are 1.0; "
            "keys and values beyond +-448 are cut off"
        )
    first = kv_head_start(spec.num_kv_heads, group.rank, group.size)
    count = kv_heads_per_rank(spec.num_kv_heads, group.size)
    return scales[:, :, first : first + count].contiguous().to(group.device)


def _read(checkpoint: Checkpoint, name: str, spec: DecoderSpec) -> Tensor:
    source = checkpoint.source(name)
    scale = source[:].float().flatten()
    if len(scale) not in (1, spec.num_kv_heads):
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}; 1 number or {spec.num_kv_heads}, "
            "one for each KV head, is expected"
        )
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(f"{source.file.path}: tensor {name} holds a scale that is no positive number")
    return scale
