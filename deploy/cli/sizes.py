"""Bytes in words."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"
