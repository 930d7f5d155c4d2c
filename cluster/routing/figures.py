"""Prometheus figures of a router's choices: what it expected in the prefix caches, and what was there."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.counters import DispatcherCounters
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
        yield self._counter(
            "router_predicted_cached_tokens",
            "Prompt tokens that the router expected in the prefix cache of the replica it chose.",
            self._counters.predicted_tokens,
        )
        yield self._counter(
            "router_actual_cached_tokens",
            "Prompt tokens that were in it, of the same requests.",
            self._counters.found_tokens,
        )
        yield self._counter(
            "router_resyncs", "Times that a replica had to tell its prefix cache anew.", self._caches.num_resyncs
        )
        blocks = GaugeMetricFamily(
            "squadron_router_index_blocks", "KV blocks in the router's index.", labels=["model_name"]
        )
        blocks.add_metric([self._model_name], len(self._caches.index))
        yield blocks

    def _counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"squadron_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
