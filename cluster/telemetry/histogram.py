"""A histogram that costs a fraction of a microsecond to fill."""

from __future__ import annotations

from bisect import bisect_left

from cluster.telemetry.buckets import USED_SECONDS, Buckets


class Histogram:
    """Counts per bucket; bucket i holds values up to and including `bounds[i]`, the last one all above.

    Filled by one thread. Another that reads meanwhile may miss the value that is being added, or its sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Buckets = USED_SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
