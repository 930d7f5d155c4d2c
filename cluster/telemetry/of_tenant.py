"""The figures that one tenant may see: those that are its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric


class OfTenant(CollectorRegistry):
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
