"""What a router adds to `cluster.telemetry.metrics`: requests, links, prefix caches, costs, failed starts, tenants.

At every scrape accepted = ended (over all outcomes) + live, whatever was killed meanwhile; and of each replica the
idle seconds and those of all tenants are all seconds. Labels are names from the key file and of models, never what
a client sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.admission.admission_queue import REASONS
from cluster.admission.tenants import Tenancy, TenantCounts
from cluster.lifecycle.starts import failed_before
from cluster.router.counters import OUTCOMES, DispatcherCounters
from cluster.router.models import Models
from cluster.router.prefix_index import CacheReports
from cluster.router.readiness import fresh
from cluster.router.replica_set import ReplicaView
from cluster.telemetry.metrics import Metrics, account_metrics, cache_metric, sleep_metric, told_histograms
from cluster.telemetry.samples import Labels, by_label, family_of, histogram_of
from cluster.wire.link import ENDS

if TYPE_CHECKING:  # a front end without Ray must not wait for it
    from cluster.lifecycle.app_status import AppPicture


class RequestCollector(Collector):
    """Reads a dispatcher's counters at each scrape.

    live: says how many requests have not ended. queued: how many wait in the router, whether taken in or not.
    deferred: how many of those wait for a replica, and not for their turn.
    """

    def __init__(
        self,
        model_name: str,
        counters: DispatcherCounters,
        live: Callable[[], int],
        queued: Callable[[], int],
        deferred: Callable[[], int] = int,
    ) -> None:
        self._model_name = model_name
        self._counters = counters
        self._live = live
        self._queued = queued
        self._deferred = deferred

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters and the gauges."""
        counters = self._counters
        label = (self._model_name,)
        yield family_of("requests_live", {label: self._live()})
        queued, deferred = self._queued(), self._deferred()
        yield family_of("requests_queued", {label: queued})
        reasons = {"capacity": queued - deferred, "deferred": deferred}
        yield self._by("requests_queued_by_reason", tuple(reasons), reasons)
        yield family_of("requests_accepted", {label: counters.accepted})
        yield self._by("requests_ended", OUTCOMES, counters.outcomes)
        yield self._by("links_lost", ENDS, counters.links_lost)
        yield family_of("stale_rows", {label: counters.stale_rows + counters.stale_reports})
        yield family_of("misplaced_rows", {label: counters.misplaced_rows})

    def _by(self, name: str, known: Sequence[str], values: Mapping[str, int]) -> Metric:
        return family_of(name, {(self._model_name, key): value for key, value in by_label(known, values).items()})


class CostCollector(Collector):
    """Reads the accounts of one model's replicas, as they last reported them, and a dispatcher's counters."""

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
        yield from told_histograms(self._model_name, known)
        caches = {view.replica_id: (view.block_size, view.num_kv_blocks) for view in self._replicas()}
        yield cache_metric(self._model_name, caches)
        yield sleep_metric(self._model_name, {view.replica_id: view.asleep for view in self._replicas()})
        label = (self._model_name,)
        yield histogram_of("request_device_seconds", label, self._counters.device_seconds)
        yield histogram_of("request_kv_block_seconds", label, self._counters.block_seconds)


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


class IngressCollector(Collector):
    """Tells at each scrape how many answers their ingress had no room to keep. label: the value of `model_name`."""

    def __init__(self, unkept: Callable[[], int], label: Callable[[], str]) -> None:
        self._unkept = unkept
        self._label = label

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counter."""
        yield family_of("answers_unkept", {(self._label(),): self._unkept()})


class StartCollector(Collector):
    """Tells at each scrape how often the starts that go on now have failed before.

    models: each model with what Serve calls the deployment of its replicas. picture: what was last seen of the app.
    """

    def __init__(self, models: Sequence[tuple[str, str]], picture: Callable[[], AppPicture | None]) -> None:
        self._models = models
        self._picture = picture

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the one gauge, with no samples while Ray is not reached."""
        picture = fresh(self._picture(), time.monotonic())
        starts = {} if picture is None else picture.starts
        known = [(model, starts[deployment]) for model, deployment in self._models if deployment in starts]
        yield family_of("replica_failed_starts", {(model,): failed_before(records) for model, records in known})


class TenantCollector(Collector):
    """Reads the counters of a `Tenancy` and the models' gates when Prometheus asks.

    A request that never got to a model counts under the name "", or that of the one model there is.
    """

    def __init__(self, tenancy: Tenancy, models: Models, metrics: Metrics) -> None:
        self._tenancy = tenancy
        self._models = models
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance: which tenants there are is known when asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of every tenant that has called."""
        yield from _door(self._counts())
        yield from self._gates(sorted({tenant for _, tenant in self._tenancy.counts}))

    def _counts(self) -> Mapping[tuple[str, str], TenantCounts]:
        found: dict[tuple[str, str], TenantCounts] = {}
        for (model, tenant), counts in self._tenancy.counts.items():
            found.setdefault((self._metrics.label(model), tenant), TenantCounts()).add(counts)
        return found

    def _gates(self, tenants: Sequence[str]) -> Iterable[Metric]:
        waiting: dict[Labels, float] = {}
        shed: dict[Labels, float] = {}
        for front in self._models:
            queued = front.admission.waiting()
            for tenant in tenants:
                waiting[front.model_id, tenant] = queued.get(tenant, 0)
                shed[front.model_id, tenant] = front.admission.shed[tenant]
        yield family_of("tenant_requests_queued", waiting)
        yield family_of("tenant_requests_shed", shed)
        yield from self._queues()

    def _queues(self) -> Iterable[Metric]:
        queues = {(front.model_id,): front.admission for front in self._models}
        waits = {label: admission.state() for label, admission in queues.items()}
        yield family_of("sequences_dispatched", {label: admission.num_inside for label, admission in queues.items()})
        yield family_of("tokens_dispatched", {label: admission.tokens_inside for label, admission in queues.items()})
        refused: dict[Labels, float] = {
            (front.model_id, reason): number
            for front in self._models
            for reason, number in by_label(REASONS, front.admission.rejections).items()
        }
        yield family_of("admission_rejections", refused)
        yield family_of("queued_tokens", {label: figures.tokens for label, figures in waits.items()})
        yield family_of("queue_age_seconds", {label: figures.age for label, figures in waits.items()})
        yield family_of("queue_drain_tokens_per_second", {label: figures.rate for label, figures in waits.items()})


def _door(found: Mapping[tuple[str, str], TenantCounts]) -> Iterable[Metric]:
    requests: dict[Labels, float] = {
        (*key, outcome): number for key, counts in found.items() for outcome, number in counts.requests.items()
    }
    yield family_of("tenant_requests", requests)
    yield family_of("tenant_prompt_tokens", {key: counts.prompt_tokens for key, counts in found.items()})
    yield family_of("tenant_generation_tokens", {key: counts.output_tokens for key, counts in found.items()})
