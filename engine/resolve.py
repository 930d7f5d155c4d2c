"""Fills in what the flags left open, from the model and the machine."""

from __future__ import annotations

import os

import torch

from engine.attention_choice import check_attention_on_cpu
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_room import fit_given_blocks
from engine.models.spec import DecoderSpec
from engine.quantization import check_capability, check_device, quantization_of

HALF = ("bfloat16", "float16")


def resolve(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """Return the config with device, dtype, quantization and max_model_len filled in.

    Raises `ConfigError` for a device that is not there or lacks what was asked for, and what `resolve_for` raises.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device}: torch sees no CUDA device here; use device=cpu", "device")
    resolved = resolve_for(config, spec, device)
    check_capability(quantization_of(resolved, spec), device)
    if device == "cpu":
        check_attention_on_cpu(resolved, spec)
        _check_no_graphs(resolved)
    return resolved


def resolve_for(config: EngineConfig, spec: DecoderSpec, device: str) -> EngineConfig:
    """Return the config as it is on `device`, which need not be in this machine.

    Raises `ConfigError` for a context that the model was not made for, or one that `num_kv_blocks` does not hold.
    """
    limit = config.max_model_len or spec.max_positions
    if limit > spec.max_positions:
        raise ConfigError(
            f"max_model_len={limit} is beyond the model's {spec.max_positions} positions; use at most that",
            "max_model_len",
        )
    dtype = _auto_dtype(spec, device) if config.dtype == "auto" else config.dtype
    shrink = config.max_model_len is None
    quantization = quantization_of(config, spec)
    check_device(quantization, device)
    method = None if quantization is None else quantization.method
    found = config.resolved(device=device, max_model_len=limit, dtype=dtype, quantization=method)
    return fit_given_blocks(found, shrink)


def _auto_dtype(spec: DecoderSpec, device: str) -> str:
    if spec.checkpoint_dtype not in HALF:
        return "float32"
    if device.startswith("cuda"):
        return spec.checkpoint_dtype
    # Without matrix units for bfloat16 its products are several times slower than those of float32.
    probe = getattr(torch.cpu, "get_capabilities", None)  # newer than torch 2.11
    can = probe() if probe else {}
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16") else "float32"


def _check_no_graphs(config: EngineConfig) -> None:
    if config.cudagraph_capture_sizes is not None:
        name = "cudagraph_capture_sizes"
        raise ConfigError(f"{name} is for CUDA graphs, which device=cpu does not have; leave it out", name)


def set_threads(size: int) -> None:
    """Share this machine's cores between the `size` ranks of a group on CPU, unless OMP_NUM_THREADS says how many."""
    if size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // size))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
