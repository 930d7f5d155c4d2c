"""What tenants did, for Prometheus. Labels are names from the key file and of models, never what a client sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.admission.tenancy import Tenancy, TenantCounts
from cluster.router.models.registry import Models
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.samples import Labels, family_of


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
            queued = front.gate.waiting()
            for tenant in tenants:
                waiting[front.model_id, tenant] = queued.get(tenant, 0)
                shed[front.model_id, tenant] = front.gate.shed[tenant]
        yield family_of("tenant_requests_queued", waiting)
        yield family_of("tenant_requests_shed", shed)
        yield from self._queues()

    def _queues(self) -> Iterable[Metric]:
        gates = {(front.model_id,): front.gate for front in self._models}
        waits = {label: gate.figures() for label, gate in gates.items()}
        yield family_of("sequences_dispatched", {label: gate.num_inside for label, gate in gates.items()})
        yield family_of("tokens_dispatched", {label: gate.tokens_inside for label, gate in gates.items()})
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
