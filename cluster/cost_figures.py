"""Prometheus figures of what was used, and by whom: the replicas' accounts, and what a request comes to.

For whoever watches: of each replica, at every scrape, the idle seconds and those of all tenants are all seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.counters import DispatcherCounters, Histogram
from cluster.fleet import ReplicaView
from cluster.messages import Costs, Usage

_DEVICES = "Seconds of the replica's devices"
_BLOCKS = "Seconds of the replica's KV blocks"


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
        known = [(view.replica_id, view.costs) for view in self._replicas() if view.costs is not None]
        yield from self._accounts("device_seconds", _DEVICES, known, lambda used: used.device_seconds)
        yield from self._accounts("kv_block_seconds", _BLOCKS, known, lambda used: used.block_seconds)
        devices, blocks = self._counters.device_seconds, self._counters.block_seconds
        yield self._histogram("request_device_seconds", "Device seconds of a completed request.", devices)
        yield self._histogram("request_kv_block_seconds", "KV block seconds of a completed request.", blocks)

    def _accounts(
        self, name: str, text: str, known: Sequence[tuple[str, Costs]], read: Callable[[Usage], float]
    ) -> Iterable[Metric]:
        labels = ["model_name", "replica"]
        total = CounterMetricFamily(f"squadron_{name}", f"{text}, used or not.", labels=labels)
        idle = CounterMetricFamily(f"squadron_idle_{name}", f"{text} that nobody used.", labels=labels)
        tenants = CounterMetricFamily(
            f"squadron_tenant_{name}", f"{text} that a tenant used.", labels=[*labels, "tenant"]
        )
        for replica, costs in known:
            total.add_metric([self._model_name, replica], read(costs.total))
            idle.add_metric([self._model_name, replica], read(costs.idle))
            for tenant, used in costs.tenants.items():
                tenants.add_metric([self._model_name, replica, tenant], read(used))
        return total, idle, tenants

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"squadron_{name}", text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._model_name], buckets, histogram.total)
        return family
