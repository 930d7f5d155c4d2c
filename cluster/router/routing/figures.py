"""Prometheus figures of a router's choices: what it expected in the prefix caches, and what was there."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.router.counters import DispatcherCounters
from cluster.router.routing.cache_reports import CacheReports
from cluster.telemetry.samples import family_of


class RoutingCollector(Collector):
    """Reads the figures of one model's router at each scrape."""

    def __init__(self, model_name: str, counters: DispatcherCounters, caches: CacheReports) -> None:
        self._model_name = model_name
        self._counters = counters
        self._caches = caches

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters and the one gauge."""
        label = (self._model_name,)
        yield family_of("router_predicted_cached_tokens", {label: self._counters.predicted_tokens})
        yield family_of("router_actual_cached_tokens", {label: self._counters.found_tokens})
        yield family_of("router_resyncs", {label: self._caches.num_resyncs})
        yield family_of("router_index_blocks", {label: len(self._caches.index)})
