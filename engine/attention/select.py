"""Chooses the attention backend that fits the model and the device."""

from __future__ import annotations

import logging

from engine.attention.base import AttentionBackend, AttentionSpec
from engine.attention.flash import FlashAttention, why_not_flash
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError

logger = logging.getLogger(__name__)


def select_backend(wanted: str, spec: AttentionSpec) -> AttentionBackend:
    """Return the backend called `wanted`, or with "auto" the fastest that works here.

    Raises `ConfigError` naming `attention_backend` when the wanted one cannot be used.
    """
    if wanted == "reference":
        return ReferenceAttention(spec)
    reason = why_not_flash(spec)
    if reason is None:
        logger.info("attention backend: flash")
        return FlashAttention(spec)
    if wanted == "flash":
        raise ConfigError(f"attention_backend=flash cannot be used: {reason}", "attention_backend")
    # On a GPU the reference is many times slower than it need be; on a CPU it is what there is.
    level = logging.WARNING if spec.device.type == "cuda" else logging.INFO
    logger.log(level, "attention backend: reference (flash cannot be used: %s)", reason)
    return ReferenceAttention(spec)
