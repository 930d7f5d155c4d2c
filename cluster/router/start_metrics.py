"""Prometheus figures of starts that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.lifecycle.app_watch import AppPicture
from cluster.lifecycle.starts import failed_before
from cluster.router.app_body import fresh
from cluster.telemetry.samples import family_of


class StartCollector(Collector):
    """Tells at each scrape how often the starts that go on now have failed before.

    models: each model with what Serve calls the deployment of its replicas. picture: what was last seen of the app.
    """

    def __init__(self, models: Sequence[tuple[str, str]], picture: Callable[[], AppPicture | None]) -> None:
        self._models = models
        self._picture = picture

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the one gauge, with no samples while Ray is not reached."""
        picture = fresh(self._picture(), time.monotonic())
        starts = {} if picture is None else picture.starts
        known = [(model, starts[deployment]) for model, deployment in self._models if deployment in starts]
        yield family_of("replica_failed_starts", {(model,): failed_before(records) for model, records in known})
