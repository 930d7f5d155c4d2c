"""Chooses the attention backend that fits the model and the device."""

from __future__ import annotations

import logging

from engine.attention.base import AttentionBackend, AttentionSpec
from engine.attention.flash import FlashAttention, why_not_flash
from engine.attention.native import NativeAttention, why_not_native_attention
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError

logger = logging.getLogger(__name__)


def select_backend(wanted: str, spec: AttentionSpec) -> AttentionBackend:
    """Return the backend called `wanted`, or with "auto" the fastest that works here.

    Raises `ConfigError` naming `attention_backend` when the wanted one cannot be used.
    """
    reasons = []
    for name, find in (("flash", _flash), ("native", _native)):
        if wanted in (name, "auto"):
            found = find(spec)
            if not isinstance(found, str):
                logger.info("attention backend: %s", name)
                return found
            reasons.append(f"{name} cannot be used: {found}")
    if wanted not in ("reference", "auto"):
        raise ConfigError(f"attention_backend={wanted} cannot be used: {reasons[0]}", "attention_backend")
    # On a GPU the reference is many times slower than it need be.
    level = logging.WARNING if reasons and spec.device.type == "cuda" else logging.INFO
    logger.log(level, "attention backend: reference%s", "".join(f"; {reason}" for reason in reasons))
    return ReferenceAttention(spec)


def _flash(spec: AttentionSpec) -> AttentionBackend | str:
    return why_not_flash(spec) or FlashAttention(spec)


def _native(spec: AttentionSpec) -> AttentionBackend | str:
    return why_not_native_attention(spec) or NativeAttention.create(spec) or "its C sources cannot be compiled here"
