"""What the layers of a model ask of attention, and whether it can be had, told before any weight is read."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionSpec
from engine.attention.select import select_backend
from engine.config import EngineConfig
from engine.models.spec import DecoderSpec

FOR_GPUS = ("flash", "triton", "torch_varlen")


def attention_spec(
    config: EngineConfig, spec: DecoderSpec, heads: tuple[int, int], device: torch.device
) -> AttentionSpec:
    """Return the layers' needs. config: resolved. heads: query heads and KV heads of one rank."""
    return AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        windows=tuple(sorted(set(spec.sliding_windows))),
        softcap=spec.attention_softcap,
        block_size=config.block_size,
        dtype=getattr(torch, config.dtype),
        device=device,
        fp8_cache=config.fp8_cache,
        batch_invariant=config.batch_invariant,
    )


def check_attention_on_cpu(config: EngineConfig, spec: DecoderSpec) -> None:
    """Raise `ConfigError` for a backend, a cache or an invariance that a CPU does not have. config: resolved.

    What remains is found out by compiling, which nobody who only checks a config should wait for.
    """
    varies = config.batch_invariant and config.attention_backend == "reference"
    if config.attention_backend in FOR_GPUS or config.fp8_cache or varies:
        size = config.tensor_parallel_size
        heads = max(spec.num_heads // size, 1), max(spec.num_kv_heads // size, 1)
        select_backend(config.attention_backend, attention_spec(config, spec, heads, torch.device("cpu")))
