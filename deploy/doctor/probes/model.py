"""A script: prints what this machine has of a model and whether it can hold it, as one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster.model_names import resolve_model
from deploy.capacity.fit import SIZES, fit
from deploy.capacity.gpus import REPORTED, Gpu
from deploy.cli.model_files import read_model_config
from deploy.cli.terminal import GIB
from deploy.doctor.probes.weights import read as read_products
from engine.config import EngineConfig
from engine.device.machine import free_memory
from engine.errors import CheckpointError, ConfigError
from engine.kv.cache_size import LEAST_CONTEXT
from engine.loader.checkpoint import HUB_FILES, check_weight_files, weight_files
from engine.models.config import ModelConfig
from engine.quantization.fp8 import LEAST_CAPABILITY
from engine.resolve import resolve
from engine.worker.footprint import footprint_of
from parallel.errors import ShardingError


def read(name: str) -> dict[str, Any]:
    """Return what is there of a model, whether it fits, and how its weights are held.

    error: why nothing more is known. bytes: of memory. ranks: fewest that hold it, None where no number does.
    """
    try:
        place = resolve_model(name)
        model = read_model_config(place)
        found = {"architecture": model.architecture, **_files(place), **_held(model)}
        return {**found, **(_on_gpus(place, model, _gpus()) if torch.cuda.is_available() else _on_cpu(place, model))}
    except (CheckpointError, ConfigError) as error:
        return {"error": str(error)}


def _files(place: str) -> dict[str, Any]:
    """Return where the weights are and what they take on disk.

    folder: None = still at the hub. damage: what lacks.
    """
    folder = Path(place)
    if not folder.is_dir():
        try:
            folder = Path(
                huggingface_hub.snapshot_download(place, allow_patterns=list(HUB_FILES), local_files_only=True)
            )
            check_weight_files(folder)
        except (LocalEntryNotFoundError, CheckpointError):
            return {"folder": None}
    try:
        names = weight_files(folder)
        if closed := [each for each in names if not os.access(folder / each, os.R_OK)]:
            return {"folder": str(folder), "damage": f"{closed[0]} cannot be read by this user"}
        check_weight_files(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "damage": str(error)}
    return {"folder": str(folder), "files": len(names), "size": sum((folder / each).stat().st_size for each in names)}


def _held(model: ModelConfig) -> dict[str, Any]:
    """Return how the weights are held, None = plain, and what multiplies here.

    blocks: whether any of them, in eight bits, have scales of blocks or groups.
    """
    held = model.quantization
    return {
        "method": held and held.method,
        "weights": held and held.weights,
        "blocks": held is not None and any(each.block for each in held.all),
        "products": read_products(),
    }


def _gpus() -> list[Gpu]:
    found = []
    for index in range(torch.cuda.device_count()):
        kind = torch.cuda.get_device_properties(index)
        fp8 = 1.0 if (kind.major, kind.minor) >= LEAST_CAPABILITY else None
        # Its speed is not asked for.
        found.append(Gpu(kind.name, kind.total_memory / GIB / REPORTED, bandwidth=1, fp32=1, bf16=1, fp8=fp8))
    return found


def _on_gpus(place: str, model: ModelConfig, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the fewest of these GPUs that hold a model, by the smallest, with the context that they leave."""
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    found: dict[str, Any] = {"device": "cuda", "gpus": len(gpus), "gpu": smallest.name, "ranks": None}
    for ranks in [size for size in SIZES if size <= len(gpus)]:
        try:
            held = fit(EngineConfig(place, tensor_parallel_size=ranks), model, smallest)
        except ShardingError:
            continue
        except ConfigError as error:
            found["refusal"] = str(error)
            continue
        return {
            **found,
            "ranks": ranks,
            "weight_bytes": held.footprint.weight_bytes,
            "context": held.config.context_len,
            "positions": model.max_positions,
        }
    return found


def _on_cpu(place: str, model: ModelConfig) -> dict[str, Any]:
    """Return what the weights take beside the smallest cache that serves, and what is free."""
    config = resolve(EngineConfig(place, device="cpu"), model)
    found = footprint_of(config, model)
    least = -(-min(LEAST_CONTEXT, model.max_positions) // config.block_size) * found.block_bytes
    return {
        "device": "cpu",
        "weight_bytes": found.weight_bytes,
        "needed": found.weight_bytes + found.step_bytes + least,
        "free": free_memory(),
    }


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1])))
