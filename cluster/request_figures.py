"""Prometheus figures of a router's requests and links: what its dispatcher counted, and what should add up.

For whoever watches: at every scrape accepted = ended (over all outcomes) + live, whatever was killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.counters import DispatcherCounters
from cluster.metric_families import counter_of, gauge_of


class RequestCollector(Collector):
    """Reads a dispatcher's counters at each scrape. live: says how many requests have not ended."""

    def __init__(self, model_name: str, counters: DispatcherCounters, live: Callable[[], int]) -> None:
        self._model_name = model_name
        self._counters = counters
        self._live = live

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters and the one gauge."""
        counters = self._counters
        model = self._model_name
        yield gauge_of("requests_live", "Requests that have not ended.", {model: self._live()})
        yield counter_of("requests_accepted", "Requests that were taken in.", {model: counters.accepted})
        yield self._by(
            "requests_ended",
            "Requests that ended: completed, aborted, or the error's code.",
            "outcome",
            counters.outcomes,
        )
        yield self._by("links_lost", "Links to replicas that ended, by reason.", "reason", counters.links_lost)
        stale = counters.stale_rows + counters.stale_reports
        yield counter_of("stale_rows", "Rows and reports of former attempts and lives, dropped.", {model: stale})
        yield counter_of("misplaced_rows", "Tokens that were not the next one.", {model: counters.misplaced_rows})

    def _by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"squadron_{name}", text, labels=["model_name", label])
        for key, value in dict(values).items():
            family.add_metric([self._model_name, key], value)
        return family
