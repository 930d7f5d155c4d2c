"""Prometheus figures of what was used, and by whom: the replicas' accounts, and what a request comes to.

For whoever watches: of each replica, at every scrape, the idle seconds and those of all tenants are all seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.router.counters import DispatcherCounters
from cluster.router.fleet import ReplicaView
from cluster.telemetry.samples import Labels, family_of, histogram_of
from cluster.wire.message_parts import Costs, Usage

_UNITS: Mapping[str, Callable[[Usage], float]] = {
    "device_seconds": lambda used: used.device_seconds,
    "kv_block_seconds": lambda used: used.block_seconds,
}


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


def account_metrics(model_name: str, accounts: Mapping[str, Costs]) -> Iterable[Metric]:
    """Yield the accounts of a model's replicas, by replica."""
    for unit, read in _UNITS.items():
        used = {(model_name, replica): costs for replica, costs in accounts.items()}
        yield family_of(unit, {labels: read(costs.total) for labels, costs in used.items()})
        yield family_of(f"idle_{unit}", {labels: read(costs.idle) for labels, costs in used.items()})
        tenants: dict[Labels, float] = {
            (*labels, name): read(usage) for labels, costs in used.items() for name, usage in costs.tenants.items()
        }
        yield family_of(f"tenant_{unit}", tenants)
    compiled: dict[Labels, float] = {
        (model_name, replica, name): seconds
        for replica, costs in accounts.items()
        for name, seconds in costs.grammars.items()
    }
    yield family_of("tenant_grammar_seconds", compiled)
