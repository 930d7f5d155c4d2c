"""Prometheus metrics of a router: requests, links, what requests cost.

At every scrape accepted = ended (over all outcomes) + live, whatever was killed meanwhile; and of each replica the
idle seconds and those of all tenants are all seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.router.counters import DispatcherCounters
from cluster.router.fleet import ReplicaView
from cluster.telemetry.engine import account_metrics
from cluster.telemetry.samples import by_label, family_of, histogram_of
from cluster.wire.link import ENDS

# Codes of errors that a request, once it is taken in, ends with by a fault of ours; all others are its client's.
FAULTS = (
    "no_replica",
    "replica_lost",
    "model_changed",
    "out_of_memory",
    "prompt_logprobs_out_of_memory",
    "shutting_down",
    "internal_error",
    "request_quarantined",
)
OUTCOMES = ("completed", "aborted", "deadline_exceeded", *FAULTS)  # that alerts go by


class RequestCollector(Collector):
    """Reads a dispatcher's counters at each scrape.

    live: says how many requests have not ended. queued: how many wait in the router, whether taken in or not.
    """

    def __init__(
        self, model_name: str, counters: DispatcherCounters, live: Callable[[], int], queued: Callable[[], int]
    ) -> None:
        self._model_name = model_name
        self._counters = counters
        self._live = live
        self._queued = queued

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters and the gauges."""
        counters = self._counters
        label = (self._model_name,)
        yield family_of("requests_live", {label: self._live()})
        yield family_of("requests_queued", {label: self._queued()})
        yield family_of("requests_accepted", {label: counters.accepted})
        yield self._by("requests_ended", OUTCOMES, counters.outcomes)
        yield self._by("links_lost", ENDS, counters.links_lost)
        yield family_of("stale_rows", {label: counters.stale_rows + counters.stale_reports})
        yield family_of("misplaced_rows", {label: counters.misplaced_rows})

    def _by(self, name: str, known: Sequence[str], values: Mapping[str, int]) -> Metric:
        return family_of(name, {(self._model_name, key): value for key, value in by_label(known, values).items()})


class CostCollector(Collector):
    """Reads the accounts of one model's replicas, as they last told them, and a dispatcher's counters."""

    def __init__(
        self, model_name: str, replicas: Callable[[], Sequence[ReplicaView]], counters: DispatcherCounters
    ) -> None:
        self._model_name = model_name
        self._replicas = replicas
        self._counters = counters

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the accounts, and the histograms of what requests used."""
        known = {view.replica_id: view.costs for view in self._replicas() if view.costs is not None}
        yield from account_metrics(self._model_name, known)
        label = (self._model_name,)
        yield histogram_of("request_device_seconds", label, self._counters.device_seconds)
        yield histogram_of("request_kv_block_seconds", label, self._counters.block_seconds)
