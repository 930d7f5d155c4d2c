"""Percentiles of a histogram's growth, as Prometheus' `histogram_quantile` takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds below which half, 95 % and 99 % of the observed stay."""

    p50: float
    p95: float
    p99: float


def percentiles(buckets: Mapping[str, float]) -> Percentiles | None:
    """Return the percentiles of a histogram. buckets: cumulative counts, by `le`. None where nothing was observed."""
    found = [quantile(buckets, share) for share in (0.5, 0.95, 0.99)]
    return None if None in found else Percentiles(*(one for one in found if one is not None))


def quantile(buckets: Mapping[str, float], share: float) -> float | None:
    """Return the value below which `share` (0 to 1) of the observed stay; None where nothing was observed.

    Within a bucket they are taken to lie evenly. What lies above the last bound counts as that bound.
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    rank = share * bounds[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
