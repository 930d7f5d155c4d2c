"""A time of day that tests set, for quotas."""

from __future__ import annotations

import types

import pytest


class Clock:
    """Seconds since 1970, at the beginning of a minute."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def set_clock(patch: pytest.MonkeyPatch, now: float = 1_800_000_000.0) -> Clock:
    """Return a clock that the library of quotas goes by as well."""
    clock = Clock(now)
    patch.setattr("limits.aio.storage.memory.time", types.SimpleNamespace(time=clock))
    return clock
