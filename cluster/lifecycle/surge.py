"""Whether an update starts a new copy before it stops an old one. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

Resources = Mapping[str, float]


def surge_percent(copies: int) -> int:
    """Return Serve's `max_surge_percent` that allows one copy more than `copies` (Serve rounds up).

    Above a hundred copies it allows one more for each hundred.
    """
    return max(1, 100 // copies)


def fits(needed: Resources, free: Resources) -> bool:
    """Whether the cluster has so much of everything free."""
    return all(free.get(kind, 0.0) >= amount for kind, amount in needed.items())
