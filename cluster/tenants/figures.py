"""What tenants did, for Prometheus. Labels are names from the key file and of models, never what a client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.models.registry import Models
from cluster.tenants.fair_gate import FairGate
from cluster.tenants.tenancy import Tenancy, TenantCounts

_LABELS = ("model_name", "tenant")


class TenantCollector(Collector):
    """Reads the counters of a `Tenancy` and the models' gates when Prometheus asks.

    A request that never got to a model counts under the name "", or that of the one model there is.
    """

    def __init__(self, tenancy: Tenancy, models: Models) -> None:
        self._tenancy = tenancy
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance: which tenants there are is known when asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of every tenant that has called."""
        yield from _door(self._counts())
        yield from self._gates(sorted({tenant for _, tenant in self._tenancy.counts}))

    def _counts(self) -> Mapping[tuple[str, str], TenantCounts]:
        other = next(iter(self._models)).model_id if len(self._models) == 1 else ""
        found: dict[tuple[str, str], TenantCounts] = {}
        for (model, tenant), counts in self._tenancy.counts.items():
            found.setdefault((model or other, tenant), TenantCounts()).add(counts)
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
        inside = GaugeMetricFamily(
            "squadron_sequences_dispatched", "Sequences past the fair gate.", labels=["model_name"]
        )
        for front in self._models:
            queued = front.gate.waiting()
            for tenant in tenants:
                waiting.add_metric([front.model_id, tenant], queued.get(tenant, 0))
                shed.add_metric([front.model_id, tenant], front.gate.shed[tenant])
            inside.add_metric([front.model_id], front.gate.num_inside)
        return (waiting, shed, inside, *self._queues())

    def _queues(self) -> Iterable[Metric]:
        read: tuple[tuple[str, str, Callable[[FairGate], float]], ...] = (
            ("tokens_dispatched", "Tokens of prompts and expected output past the fair gate.", _tokens_inside),
            ("queued_tokens", "Tokens of prompts and expected output that wait at it.", _queued_tokens),
            ("queue_age_seconds", "Seconds that the first request has waited.", _queue_age),
            ("queue_drain_tokens_per_second", "Rate at which the queue drains; 0 = not known.", _drain_rate),
        )
        for name, text, figure in read:
            gauge = GaugeMetricFamily(f"squadron_{name}", text, labels=["model_name"])
            for front in self._models:
                gauge.add_metric([front.model_id], figure(front.gate))
            yield gauge


def _tokens_inside(gate: FairGate) -> float:
    return gate.tokens_inside


def _queued_tokens(gate: FairGate) -> float:
    return gate.figures().tokens


def _queue_age(gate: FairGate) -> float:
    return gate.figures().age


def _drain_rate(gate: FairGate) -> float:
    return gate.figures().rate


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
