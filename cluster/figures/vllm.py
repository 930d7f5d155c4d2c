"""The same figures under vLLM's names, for dashboards and scalers that know those (`--metrics-compat vllm`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from cluster.figures.families import FAMILIES, VLLM_METRICS, Family

BY_FULL_NAME: Mapping[str, Family] = {family.full_name: family for family in FAMILIES.values()}


class VllmNames(CollectorRegistry):
    """A registry that shows, of the families in another one, those that vLLM has, as vLLM's own `/metrics` does."""

    def __init__(self, of: CollectorRegistry) -> None:
        super().__init__()
        self._of = of

    def collect(self) -> Iterable[Metric]:
        """Yield the families under vLLM's names."""
        for metric in self._of.collect():
            family = BY_FULL_NAME.get(metric.name)
            if family is not None and family.vllm:
                yield _renamed(metric, family)


def own_samples(metric: Metric) -> Iterable[Sample]:
    """Yield a family's samples, without those that prometheus_client adds (`_created`)."""
    return (sample for sample in metric.samples if not sample.name.endswith("_created"))


def vllm_samples(metric: Metric, family: Family) -> Iterable[Sample]:
    """Yield a family's samples, of its buckets only those that vLLM has."""
    finer = {floatToGoString(bound) for bound in family.buckets[: family.finer]}
    return (sample for sample in own_samples(metric) if sample.labels.get("le") not in finer)


def _renamed(metric: Metric, family: Family) -> Metric:
    name = VLLM_METRICS + family.name
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in vllm_samples(metric, family)
    ]
    return renamed
