"""From figures to what prometheus_client shows, by the table of families."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from cluster.telemetry.families import FAMILIES, Kind
from cluster.telemetry.histogram import Histogram

Labels = tuple[str, ...]  # values, in the order of the family's labels


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
    family = FAMILIES[name]
    metric = HistogramMetricFamily(family.full_name, family.text, labels=family.labels)
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
