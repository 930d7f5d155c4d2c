"""One scrape of a router's /metrics, and what grew between two of them. Pure.

Metrics are named without `squadron_`: `Scrape` takes it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "squadron_"
STARTED = "router_start_time_seconds"  # to the microsecond: no two routers have the same
Labels = frozenset[tuple[str, str]]
Series = Mapping[Labels, float]


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one router said at one moment. at: seconds of a monotonic clock."""

    at: float
    samples: Mapping[str, Series]

    @property
    def router(self) -> float:
        """When it started: tells it from others and from its own former lives; 0 where it does not say."""
        return min(self.samples.get(STARTED, {}).values(), default=0.0)

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels; 0 without any."""
        return sum(self.values(name, **labels))

    def values(self, name: str, **labels: str) -> Iterator[float]:
        """Yield a metric's samples that have these labels."""
        wanted = labels.items()
        return (value for key, value in self.samples.get(name, {}).items() if key >= wanted)


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two looks at the same router."""

    old: Scrape
    new: Scrape

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.new.at - self.old.at

    def rate(self, name: str, **labels: str) -> float:
        """Return how much a counter grew a second, over all its samples that have these labels."""
        return sum(self.growth(name, **labels).values()) / self.seconds

    def growth(self, name: str, **labels: str) -> Series:
        """Return how much each sample of a counter grew; one that began anew, by all that it has.

        A replica that the older scrape lacks brings counters of its whole life, which are left out.
        """
        wanted = labels.items()
        before = self.old.samples.get(name, {})
        known = _replicas(before)
        grown = {}
        for key, value in self.new.samples.get(name, {}).items():
            if key >= wanted and _replica(key) in known:
                was = before.get(key, 0.0)
                grown[key] = value - was if value >= was else value
        return grown


def read_scrape(text: str, at: float) -> Scrape:
    """Return what a body of /metrics says. Raises `ValueError` for one that is none."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                series = samples.setdefault(sample.name.removeprefix(PREFIX), {})
                series[frozenset(sample.labels.items())] = sample.value
    return Scrape(at, samples)


def by_label(series: Series, label: str, kept: Callable[[str], bool] = bool) -> dict[str, float]:
    """Return the sums over all else, by the values of one label; samples without it count nowhere."""
    sums: dict[str, float] = {}
    for key, value in series.items():
        name = dict(key).get(label, "")
        if kept(name):
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _replicas(series: Series) -> set[str]:
    """Return the replicas that a series is of; "" is what routers count themselves."""
    return {"", *map(_replica, series)}


def _replica(key: Labels) -> str:
    return dict(key).get("replica", "")
