"""Fills in what the flags left open, from the model and the machine."""

from __future__ import annotations

import torch

from engine.attention.select import select_for_layers
from engine.config import NOBIND, EngineConfig
from engine.device.topology import format_cpus
from engine.errors import ConfigError
from engine.kv.cache_size import fit_given_blocks
from engine.layers.attention import attention_specs
from engine.layers.norm import GroupsNorm, HeadsNorm
from engine.models.blueprint import outlined
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.quantization.select import check_capability, check_device, quantization_of, quantize
from engine.threads import unbound_cpus

FOR_GPUS = ("flash", "triton", "torch_varlen")  # attention backends
BIND = "cpu_omp_threads_bind"
HALF = ("bfloat16", "float16")


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config with device, dtype, quantization and max_model_len filled in.

    Raises `ConfigError` for a device that is not there or lacks what was asked for, and what `resolve_for` raises.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device}: torch sees no CUDA device here; use device=cpu", "device")
    resolved = resolve_for(config, model, device)
    check_capability(quantization_of(resolved, model.quantization), device)
    if device == "cpu":
        _check_no_graphs(resolved)
    elif config.cpu_omp_threads_bind != NOBIND:
        raise ConfigError(f"{BIND} is for device=cpu, and the device is {device}; leave it out", BIND)
    return resolved


def resolve_for(config: EngineConfig, model: ModelConfig, device: str) -> EngineConfig:
    """Return the config as it is on `device`, which need not be in this machine.

    Raises `ConfigError` for a context that the model was not made for, or one that `num_kv_blocks` does not hold.
    """
    limit = config.max_model_len or model.max_positions
    if limit > model.max_positions:
        raise ConfigError(
            f"max_model_len={limit} is beyond the model's {model.max_positions} positions; use at most that",
            "max_model_len",
        )
    dtype = _auto_dtype(model, device) if config.dtype == "auto" else config.dtype
    shrink = config.max_model_len is None
    quantization = quantization_of(config, model.quantization)
    check_device(quantization, device)
    if config.quantize_lm_head and not device.startswith("cpu"):
        raise ConfigError(
            f"quantize_lm_head is for device=cpu; on device={device} leave it out, its head stays plain",
            "quantize_lm_head",
        )
    method = None if quantization is None else quantization.method
    found = config.resolved(device=device, max_model_len=limit, dtype=dtype, quantization=method)
    return fit_given_blocks(found, shrink)


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Build the model without weights and look whether it can be run so. config: resolved.

    Raises `CheckpointError` for what its family does not implement, `ShardingError` when it cannot be split over so
    many ranks, `ConfigError` for sizes that the quantisation does not take and, on a CPU, for a backend, a cache, an
    invariance or cores that it does not have. What remains there is found out by compiling, which nobody who only
    checks a config should wait for.
    """
    _check_cpus(config)
    found = outlined(config, model)
    quantize(found.layers, found.layers_path, found.names, quantization_of(config, model.quantization))
    if config.batch_invariant and (config.device or "").startswith("cuda"):
        _check_norms(found)
    varies = config.batch_invariant and config.attention_backend == "reference"
    if config.device == "cpu" and (config.attention_backend in FOR_GPUS or config.fp8_cache or varies):
        specs, kinds = attention_specs(found.cached, config, torch.device("cpu"))
        select_for_layers(config.attention_backend, specs, kinds)


def _check_norms(model: CausalLM) -> None:
    if any(isinstance(part, HeadsNorm | GroupsNorm) and part.spans_ranks for part in model.modules()):
        raise ConfigError(
            f"batch_invariant: on a GPU the sums of {type(model).__name__}'s norms over several ranks depend on the "
            "batch; set tensor_parallel_size=1",
            "batch_invariant",
        )


def _auto_dtype(model: ModelConfig, device: str) -> str:
    if model.dtype not in HALF:
        return "float32"
    if device.startswith("cuda"):
        return model.dtype
    # Without matrix units for bfloat16 its products are several times slower than those of float32.
    probe = getattr(torch.cpu, "get_capabilities", None)  # newer than torch 2.11
    can = probe() if probe else {}
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16") else "float32"


def _check_no_graphs(config: EngineConfig) -> None:
    if config.cudagraph_capture_sizes is not None:
        name = "cudagraph_capture_sizes"
        raise ConfigError(f"{name} is for CUDA graphs, which device=cpu does not have; leave it out", name)


def _check_cpus(config: EngineConfig) -> None:
    allowed = unbound_cpus()
    missing = {cpu for group in config.cpu_groups for cpu in group} - allowed
    if missing:
        raise ConfigError(
            f"{BIND} names CPU {format_cpus(missing)}, which this process may not run on; use some of "
            f"{format_cpus(allowed) or 'none: this system binds no threads'}",
            BIND,
        )
