"""Prometheus figures of a router's choices: what it expected in the prefix caches, and what was there."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.counters import DispatcherCounters
from cluster.metric_families import counter_of, gauge_of
from cluster.routing.cache_reports import CacheReports


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
        model, counters, caches = self._model_name, self._counters, self._caches
        yield counter_of(
            "router_predicted_cached_tokens",
            "Prompt tokens that the router expected in the prefix cache of the replica it chose.",
            {model: counters.predicted_tokens},
        )
        yield counter_of(
            "router_actual_cached_tokens",
            "Prompt tokens that were in it, of the same requests.",
            {model: counters.found_tokens},
        )
        yield counter_of(
            "router_resyncs", "Times that a replica had to tell its prefix cache anew.", {model: caches.num_resyncs}
        )
        yield gauge_of("router_index_blocks", "KV blocks in the router's index.", {model: len(caches.index)})
