"""What tenants did, for Prometheus. Labels are names from the key file and of models, never what a client sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.metric_families import gauge_of
from cluster.metrics import Metrics
from cluster.models.registry import Models
from cluster.tenants.tenancy import Tenancy, TenantCounts

_LABELS = ("model_name", "tenant")


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

    def _gates(self, tenants: Iterable[str]) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "squadron_tenant_requests_queued", "Requests that wait for their tenant's turn.", labels=_LABELS
        )
        shed = CounterMetricFamily(
            "squadron_tenant_requests_shed",
            "Requests let in, then refused: too many waited, or too long.",
            labels=_LABELS,
        )
        for front in self._models:
            queued = front.gate.waiting()
            for tenant in tenants:
                waiting.add_metric([front.model_id, tenant], queued.get(tenant, 0))
                shed.add_metric([front.model_id, tenant], front.gate.shed[tenant])
        inside = {front.model_id: front.gate.num_inside for front in self._models}
        yield from (waiting, shed, gauge_of("sequences_dispatched", "Sequences past the fair gate.", inside))
        yield from self._queues()

    def _queues(self) -> Iterable[Metric]:
        inside = {front.model_id: front.gate.tokens_inside for front in self._models}
        waits = {front.model_id: front.gate.figures() for front in self._models}
        tokens = {model: figures.tokens for model, figures in waits.items()}
        ages = {model: figures.age for model, figures in waits.items()}
        rates = {model: figures.rate for model, figures in waits.items()}
        yield gauge_of("tokens_dispatched", "Tokens of prompts and expected output past the fair gate.", inside)
        yield gauge_of("queued_tokens", "Tokens of prompts and expected output that wait at it.", tokens)
        yield gauge_of("queue_age_seconds", "Seconds that the first request has waited.", ages)
        yield gauge_of("queue_drain_tokens_per_second", "Rate at which the queue drains; 0 = not known.", rates)


def _door(found: Mapping[tuple[str, str], TenantCounts]) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "squadron_tenant_requests", "Requests by tenant and what the door said.", labels=[*_LABELS, "outcome"]
    )
    prompt = CounterMetricFamily("squadron_tenant_prompt_tokens", "Prompt tokens charged.", labels=_LABELS)
    output = CounterMetricFamily("squadron_tenant_generation_tokens", "Tokens generated.", labels=_LABELS)
    for key, counts in found.items():
        for outcome, number in counts.requests.items():
            requests.add_metric([*key, outcome], number)
        prompt.add_metric(key, counts.prompt_tokens)
        output.add_metric(key, counts.output_tokens)
    return (requests, prompt, output)
