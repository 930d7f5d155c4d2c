"""Whose figures alerts are of: matchers that every selector gets, and labels by which an alert says whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.dashboards.promql import CLUSTER

RAYSERVICE_MARK = "OWN_RAYSERVICE"  # stands for the name of the release's RayService where the chart puts it
NAMESPACE_MARK = "OWN_NAMESPACE"


@dataclass(frozen=True, slots=True)
class Scope:
    """The series that alerts look at. matchers: of every selector, none = all that Prometheus sees.

    labels: of every alert, beside its severity.
    """

    matchers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def of(self, metric: str, *more: str) -> str:
        """Return the selector of a metric. more: further matchers."""
        return f"{metric}{{{','.join((*self.matchers, *more))}}}" if self.matchers or more else metric


EVERYTHING = Scope()
# KubeRay calls a RayService's clusters NAME-abcde, and before version 1.4 NAME-raycluster-abcde. Prometheus' operator
# puts the namespace to each series: a release of the same name may be in another one.
RELEASE = Scope(
    (f'{CLUSTER}=~"{RAYSERVICE_MARK}(-raycluster)?-[a-z0-9]{{5}}"', f'namespace="{NAMESPACE_MARK}"'),
    {"namespace": NAMESPACE_MARK, "ray_service": RAYSERVICE_MARK},
)
