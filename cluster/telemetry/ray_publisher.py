"""Publishes a process's figures through Ray's metrics, so that Ray's agent on each node shows all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ray
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray.util.metrics import Counter, Gauge

from cluster.telemetry.families import VLLM_RAY, Family, Kind, Source
from cluster.telemetry.vllm import BY_FULL_NAME, alias_labels, namesake, own_samples, vllm_samples

# Ray's counters refuse 0, and one that nothing was added to is not shown. This is lost in any sum.
LEAST = 5e-324
REPORT_INTERVAL, LEAST_INTERVAL = 10_000, 1_000  # milliseconds

_Key = tuple[str, tuple[str, ...]]


def publish_period() -> float:
    """Return how often Ray is told, in seconds: twice for each of its reports, so that none is of old figures.

    Until this process ends Ray reports what it was told last; two reports later it forgets the gauges. The interval
    of its reports is not public: where Ray has it no more, it is taken for what Ray's own default is.
    """
    settings = getattr(ray, "_config", None)
    told = getattr(settings, "metrics_report_interval_ms", None)
    return max(told() if told is not None else REPORT_INTERVAL, LEAST_INTERVAL) / 2000


class RayPublisher:
    """Tells Ray the present figures, whenever asked. Used by one thread.

    Counters are told by what was added since, gauges as they are. A histogram is told as gauges, the very series that
    Prometheus makes of one (`NAME_bucket` with `le`, `NAME_sum`, `NAME_count`): Ray's own would put each value in the
    middle of its bucket on the way, so that sums were wrong, and would have to be told every single value.

    sources: whose families this process measures; all others are passed over. own: values of the labels that tell it
    apart (`Family.own_labels`). vllm: whether to publish under vLLM's names as well.
    """

    def __init__(self, sources: Iterable[Source], own: Mapping[str, str], vllm: bool = False) -> None:
        self._sources = frozenset(sources)
        self._own = dict(own)
        self._vllm = vllm
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[_Key, float] = {}

    def publish(self, metrics: Iterable[Metric]) -> None:
        """Tell Ray the present figures."""
        for metric in metrics:
            family = BY_FULL_NAME.get(metric.name)
            if family is None or family.source not in self._sources:
                continue
            own = {label: self._own[label] for label in family.own_labels}
            for sample in own_samples(metric):
                self._tell(family.full_name, family, sample, metric.name, {**sample.labels, **own})
            if self._vllm and family.vllm:
                all_labels = alias_labels(family)
                for sample in vllm_samples(metric, family):
                    tags = {**all_labels, **sample.labels, **own}
                    self._tell(VLLM_RAY + family.vllm, namesake(family), sample, metric.name, tags)

    def _tell(self, name: str, family: Family, sample: Sample, told_as: str, tags: dict[str, str]) -> None:
        suffix = sample.name.removeprefix(told_as)
        if family.kind is Kind.COUNTER:
            self._add(name, family, sample.value, tags)
        else:
            self._gauge(name + suffix, family, tags).set(sample.value, tags)

    def _add(self, name: str, family: Family, value: float, tags: dict[str, str]) -> None:
        key = (name, tuple(tags.values()))
        told = self._told.get(key)
        if told is not None and told >= value:
            return  # nothing new, or a sum of floats that was rounded and will be more again
        self._counter(name, family, tags).inc(value - (told or 0.0) or LEAST, tags)
        self._told[key] = value

    def _counter(self, name: str, family: Family, tags: Mapping[str, str]) -> Counter:
        if name not in self._counters:
            self._counters[name] = Counter(name, family.text, tuple(tags))
        return self._counters[name]

    def _gauge(self, name: str, family: Family, tags: Mapping[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, family.text, tuple(tags))
        return self._gauges[name]
