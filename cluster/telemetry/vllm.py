"""The same figures under vLLM's names, for dashboards and scalers that know those (`--metrics-compat vllm`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from cluster.telemetry.families import FAMILIES, VLLM_METRICS, Family

BY_FULL_NAME: Mapping[str, Family] = {family.full_name: family for family in FAMILIES.values()}
_ALIKE: Mapping[str, list[Family]] = {
    name: [family for family in FAMILIES.values() if family.vllm == name]
    for name in {family.vllm for family in FAMILIES.values() if family.vllm}
}


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
