"""What tenants did, for Prometheus. Labels are names from the key file, never anything that a client sent."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.tenants.tenancy import Tenancy


class TenantCollector(Collector):
    """Reads the counters of a `Tenancy` when Prometheus asks."""

    def __init__(self, model_name: str, tenancy: Tenancy) -> None:
        self._model_name = model_name
        self._tenancy = tenancy

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance: which tenants there are is known when asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of every tenant that has called."""
        labels = ["model_name", "tenant"]
        requests = CounterMetricFamily(
            "squadron_tenant_requests", "Requests by tenant and what the door said.", labels=[*labels, "outcome"]
        )
        prompt = CounterMetricFamily("squadron_tenant_prompt_tokens", "Prompt tokens charged.", labels=labels)
        output = CounterMetricFamily("squadron_tenant_generation_tokens", "Tokens generated.", labels=labels)
        for tenant, counts in self._tenancy.counts.items():
            for outcome, number in counts.requests.items():
                requests.add_metric([self._model_name, tenant, outcome], number)
            prompt.add_metric([self._model_name, tenant], counts.prompt_tokens)
            output.add_metric([self._model_name, tenant], counts.output_tokens)
        yield from (requests, prompt, output, self._waiting(labels), self._shed(labels), self._inside())

    def _shed(self, labels: list[str]) -> Metric:
        shed = CounterMetricFamily(
            "squadron_tenant_requests_shed",
            "Requests let in, then refused: too many waited, or too long.",
            labels=labels,
        )
        for tenant in self._tenancy.counts:
            shed.add_metric([self._model_name, tenant], self._tenancy.gate.shed[tenant])
        return shed

    def _waiting(self, labels: list[str]) -> Metric:
        waiting = GaugeMetricFamily(
            "squadron_tenant_requests_queued", "Requests that wait for their tenant's turn.", labels=labels
        )
        queued = self._tenancy.gate.waiting()
        for tenant in self._tenancy.counts:
            waiting.add_metric([self._model_name, tenant], queued.get(tenant, 0))
        return waiting

    def _inside(self) -> Metric:
        inside = GaugeMetricFamily(
            "squadron_sequences_dispatched", "Sequences past the fair gate.", labels=["model_name"]
        )
        inside.add_metric([self._model_name], self._tenancy.gate.num_inside)
        return inside
