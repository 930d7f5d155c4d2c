"""Chooses the attention backend that fits the model and the device."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from engine.attention.base import AttentionBackend, AttentionSpec, PagedAttention, UnlikeLayers
from engine.attention.chunked import ChunkedAttention
from engine.attention.native import NativeAttention, why_not_native_attention
from engine.attention.reference import ReferenceAttention
from engine.attention.triton_fit import why_not_triton
from engine.attention.varlen import (
    Flash3Attention,
    FlashAttention,
    TorchVarlenAttention,
    why_not_flash,
    why_not_flash3,
    why_not_torch_varlen,
)
from engine.attention.whole_prompts import TorchPrompts, why_not_torch_prompts
from engine.errors import ConfigError

logger = logging.getLogger(__name__)


# What "auto" tries before the reference, best first.
ON_GPU = ("flash", "triton", "torch_varlen")
ON_CPU = ("flash", "native")
WITH_SINKS = ("native", "triton")
WITH_LATENT = ("native", "triton")
NO_SINKS = "it has no attention sinks, which this model needs"
NO_LATENT = "it reads no latent cache, which this model keeps"


def select_backend(wanted: str, spec: AttentionSpec) -> PagedAttention:
    """Return the backend called `wanted`, or with "auto" the fastest that works here.

    With "auto" prompts go to FlashAttention-3 where it is installed, else whole ones, which need no pages, to what
    torch brings along, else to ours.

    Raises `ConfigError` naming `attention_backend` when the wanted one cannot be used, and `kv_cache_dtype` when no
    backend that works here keeps such a cache.
    """
    if spec.fp8_cache:
        return _with_fp8_cache(wanted, spec)
    triton = _triton_beside_torch if wanted == "auto" else _triton
    finders = {"flash": _flash, "triton": triton, "torch_varlen": _torch_varlen, "native": _native}
    auto = ON_GPU if spec.device.type == "cuda" else ON_CPU
    reasons: dict[str, str] = {}
    for name in auto if wanted == "auto" else tuple({wanted} & finders.keys()):
        found = _why_not(name, spec) or finders[name](spec)
        if not isinstance(found, str):
            others = "".join(f"; {reason}" for reason in _lines(reasons))
            logger.info("attention backend: %s (%s)%s", name, type(found).__name__, others)
            return found
        reasons[name] = found
    if spec.batch_invariant:
        raise ConfigError(
            f"batch_invariant cannot be had here: {_none_is_invariant(_lines(reasons))}", "batch_invariant"
        )
    if wanted not in ("reference", "auto"):
        raise ConfigError(
            f"attention_backend={wanted} cannot be used: {reasons[wanted]}; use attention_backend=auto",
            "attention_backend",
        )
    # On a GPU the reference is many times slower than it need be.
    level = logging.WARNING if reasons and spec.device.type == "cuda" else logging.INFO
    logger.log(level, "attention backend: reference%s", "".join(f"; {reason}" for reason in _lines(reasons)))
    return ReferenceAttention(spec)


def select_for_layers(wanted: str, specs: Sequence[AttentionSpec], kinds: Sequence[int]) -> AttentionBackend:
    """Return the backend of a model, one that serves all its layers. specs, kinds: of `attention_specs`.

    Raises what `select_backend` does.
    """
    found = [_of_layers(wanted, spec) for spec in specs]
    if len(found) == 1:
        return found[0]
    for name in dict.fromkeys(each.name for each in found):
        if {each.name for each in found} != {name}:
            with suppress(ConfigError):  # for one kind of layer it is the best, another it may not serve
                found = [_of_layers(name, spec) for spec in specs]
                break
    if len({each.name for each in found}) > 1:
        found = [_of_layers("reference", spec) for spec in specs]
    return UnlikeLayers(found, kinds)


def _of_layers(wanted: str, spec: AttentionSpec) -> PagedAttention:
    """Return the backend of layers that ask for the same, and attend within chunks or not."""
    if not spec.chunk:
        return select_backend(wanted, spec)
    if spec.chunk % spec.block_size:
        fits = [size for size in (16, 32, 64, 8, 4, 2) if spec.chunk % size == 0] or [spec.chunk]
        raise ConfigError(
            f"block_size={spec.block_size}: the model attends within chunks of {spec.chunk} tokens, which must be "
            f"whole blocks; use block_size={fits[0]}",
            "block_size",
        )
    return ChunkedAttention(spec, select_backend(wanted, replace(spec, chunk=0)))


def _why_not(name: str, spec: AttentionSpec) -> str | None:
    """Return what the backend `name` lacks of all that this model needs, None for nothing."""
    if spec.sinks and name not in WITH_SINKS:
        return NO_SINKS
    return NO_LATENT if spec.latent and name not in WITH_LATENT else None


def _lines(reasons: Mapping[str, str]) -> list[str]:
    return [f"{name} cannot be used: {reason}" for name, reason in reasons.items()]


def _none_is_invariant(reasons: list[str]) -> str:
    return "; ".join((*reasons, "the reference cuts its work by the batch; use attention_backend=auto"))


def _with_fp8_cache(wanted: str, spec: AttentionSpec) -> PagedAttention:
    found: PagedAttention | str = f"{wanted} keeps keys and values in the model's dtype"
    if wanted in ("auto", "triton"):
        found = _triton(spec)
    if not isinstance(found, str):
        logger.info("attention backend: triton, the one with an fp8 cache")
        return found
    raise ConfigError(
        f"kv_cache_dtype=fp8 needs attention_backend=triton: {found}; use kv_cache_dtype=auto", "kv_cache_dtype"
    )


def _flash(spec: AttentionSpec) -> PagedAttention | str:
    newer = why_not_flash3(spec)
    if newer is None:
        return Flash3Attention(spec)
    older = why_not_flash(spec)
    if older is None:
        return FlashAttention(spec)
    return older if older == newer else f"FlashAttention-2: {older}; FlashAttention-3: {newer}"


def _torch_varlen(spec: AttentionSpec) -> PagedAttention | str:
    return why_not_torch_varlen(spec) or TorchVarlenAttention(spec)


def _native(spec: AttentionSpec) -> PagedAttention | str:
    return why_not_native_attention(spec) or NativeAttention.create(spec) or "its C sources cannot be compiled here"


def _triton(spec: AttentionSpec) -> PagedAttention | str:
    return why_not_triton(spec) or _made_triton(spec, None)


def _triton_beside_torch(spec: AttentionSpec) -> PagedAttention | str:
    reason = why_not_triton(spec)
    if reason is not None:
        return reason
    theirs = why_not_torch_prompts(spec)
    if theirs is None:
        logger.info("attention of whole prompts: torch's varlen_attn")
        return _made_triton(spec, TorchPrompts(spec))
    logger.info("attention of whole prompts: triton; torch's varlen_attn cannot be used: %s", theirs)
    return _made_triton(spec, None)


def _made_triton(spec: AttentionSpec, torchs: TorchPrompts | None) -> PagedAttention:
    if spec.latent:
        latent: PagedAttention = importlib.import_module("engine.attention.triton_latent").TritonLatentAttention(spec)
        return latent
    made: PagedAttention = importlib.import_module("engine.attention.triton").TritonAttention(spec, torchs=torchs)
    return made
