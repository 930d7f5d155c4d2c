"""Families of figures that collectors make at a scrape, one sample for each model."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def counter_of(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """Return the counter `squadron_{name}_total`. values: by model."""
    family = CounterMetricFamily(f"squadron_{name}", text, labels=["model_name"])
    for model_name, value in values.items():
        family.add_metric([model_name], value)
    return family


def gauge_of(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Return the gauge `squadron_{name}`. values: by model."""
    family = GaugeMetricFamily(f"squadron_{name}", text, labels=["model_name"])
    for model_name, value in values.items():
        family.add_metric([model_name], value)
    return family
