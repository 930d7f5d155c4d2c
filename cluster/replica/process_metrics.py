"""All figures of one replica, in its own process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from cluster.replica.core import ReplicaCore
from cluster.telemetry.engine import account_metrics, engine_metrics
from cluster.telemetry.ranks import memory_metric
from cluster.telemetry.samples import family_of


def replica_metrics(core: ReplicaCore) -> Iterable[Metric]:
    """Yield the figures of a replica and of its rank 0. Called on the event loop that it lives on."""
    model, replica = core.facts.model, core.facts.replica_id
    yield from engine_metrics(model, {replica: core.stats})
    yield from account_metrics(model, {replica: core.costs})
    yield family_of("replica_queue_age_seconds", {(model,): core.queue_age})
    yield from core.figures.collect(core.num_unwanted)
    yield memory_metric(model)
