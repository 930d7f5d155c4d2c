"""From counts to what prometheus_client shows, by the table of families: all, one tenant's, or under vLLM's names."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from cluster.telemetry.families import FAMILIES, USED_SECONDS, VLLM_METRICS, Buckets, Family, Kind

Labels = tuple[str, ...]  # values, in the order of the family's labels
BY_FULL_NAME: Mapping[str, Family] = {family.full_name: family for family in FAMILIES.values()}
_ALIKE: Mapping[str, list[Family]] = {
    name: [family for family in FAMILIES.values() if family.vllm == name]
    for name in {family.vllm for family in FAMILIES.values() if family.vllm}
}


class Histogram:
    """Counts per bucket; bucket i holds values up to and including `bounds[i]`, the last one all above.

    Filled by one thread. Another that reads meanwhile may miss the value that is being added, or its sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(
        self, bounds: Buckets = USED_SECONDS, counts: Sequence[int] | None = None, total: float = 0.0
    ) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        self.total = total  # sum of all values

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def family_of(name: str, values: Mapping[Labels, float]) -> Metric:
    """Return a counter or a gauge of the table with one sample for each of `values`."""
    family = FAMILIES[name]
    maker = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = maker(family.full_name, family.text, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric


def by_label(known: Iterable[str], values: Mapping[str, int]) -> dict[str, int]:
    """Return a copy of counts by a label, with 0 for `known` labels that are not among them.

    A counter that appears with its first event hides it: Prometheus sees no increase from nothing to 1.
    """
    return dict.fromkeys(known, 0) | dict(values)


def histogram_of(name: str, labels: Labels, histogram: Histogram) -> Metric:
    """Return a histogram of the table with one set of samples."""
    return histograms_of(name, {labels: histogram})


def histograms_of(name: str, values: Mapping[Labels, Histogram]) -> Metric:
    """Return a histogram of the table with a set of samples for each of `values`."""
    family = FAMILIES[name]
    metric = HistogramMetricFamily(family.full_name, family.text, labels=family.labels)
    for labels, histogram in values.items():
        bounds = [floatToGoString(bound) for bound in (*histogram.bounds, math.inf)]
        metric.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
    return metric


def live_counter(name: str, registry: CollectorRegistry) -> PrometheusCounter:
    """Return a counter of the table that counts by itself."""
    family = FAMILIES[name]
    return PrometheusCounter(family.full_name, family.text, family.labels, registry=registry)


def live_histogram(name: str, registry: CollectorRegistry) -> PrometheusHistogram:
    """Return a histogram of the table that counts by itself."""
    family = FAMILIES[name]
    return PrometheusHistogram(
        family.full_name, family.text, family.labels, registry=registry, buckets=family.buckets
    )


class VllmNames(CollectorRegistry):
    """A registry that shows, of the families in another one, those that vLLM has, as vLLM's own `/metrics` does."""

    def __init__(self, of: CollectorRegistry) -> None:
        super().__init__()
        self._of = of

    def collect(self) -> Iterable[Metric]:
        """Yield the families under vLLM's names, each name once."""
        found: dict[str, Metric] = {}
        for metric in self._of.collect():
            family = BY_FULL_NAME.get(metric.name)
            if family is not None and family.vllm:
                alias = found.setdefault(family.vllm, _alias(family))
                alias.samples += _renamed(metric, family, alias.name)
        return found.values()


def namesake(family: Family) -> Family:
    """Return the family whose name vLLM has for this one: itself, but where several share one of vLLM's."""
    return FAMILIES.get(family.vllm, family)


def alias_labels(family: Family) -> Mapping[str, str]:
    """Return the labels, all empty, that families have through Ray which share this one's name of vLLM's.

    Series of one name have the same labels then; to Prometheus an empty one is none.
    """
    return {label: "" for alike in _ALIKE[family.vllm] for label in alike.ray_labels}


def own_samples(metric: Metric) -> Iterable[Sample]:
    """Yield a family's samples, without those that prometheus_client adds (`_created`)."""
    return (sample for sample in metric.samples if not sample.name.endswith("_created"))


def vllm_samples(metric: Metric, family: Family) -> Iterable[Sample]:
    """Yield a family's samples, of its buckets only those that vLLM has."""
    finer = {floatToGoString(bound) for bound in family.buckets[: family.finer]}
    return (sample for sample in own_samples(metric) if sample.labels.get("le") not in finer)


def _alias(family: Family) -> Metric:
    return Metric(VLLM_METRICS + family.vllm, namesake(family).text, family.kind.value)


def _renamed(metric: Metric, family: Family, name: str) -> list[Sample]:
    samples = vllm_samples(metric, family)
    return [sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in samples]


class TenantRegistry(CollectorRegistry):
    """A registry that shows, of another one, the samples that are labelled with a tenant's name, and nothing else.

    What has no such label counts others too, and a tenant who knows its own part of it would know theirs.
    """

    def __init__(self, of: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._of = of
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        """Yield the families of which the tenant has samples."""
        for metric in self._of.collect():
            own = [sample for sample in metric.samples if sample.labels.get("tenant") == self._tenant]
            if own:
                shown = Metric(metric.name, metric.documentation, metric.type)
                shown.samples = own
                yield shown
