"""What replicas tell Serve's controller (`record_autoscaling_stats`), and how it is read there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.admission.figures import QueueFigures
from cluster.lifecycle.autoscaling.policy import QueueLoad, ReplicaLoad
from engine.report import EngineStats

PREFILL_WAIT, OCCUPANCY, KV_USAGE = "squadron_prefill_wait", "squadron_occupancy", "squadron_kv_usage"
QUEUED, QUEUE_WAIT, QUEUE_AGE = "squadron_queued", "squadron_queue_wait", "squadron_queue_age"


def replica_stats(
    stats: EngineStats, max_num_seqs: int, prefill_wait: float, queue: QueueFigures
) -> dict[str, float]:
    """Return a replica's figures and those of the routers' queues, as it has heard of them."""
    return {
        PREFILL_WAIT: prefill_wait,
        OCCUPANCY: (stats.num_running + stats.num_waiting) / max_num_seqs,
        KV_USAGE: stats.kv_usage,
        QUEUED: float(queue.requests),
        QUEUE_WAIT: queue.tokens / queue.rate if queue.rate else 0.0,
        QUEUE_AGE: queue.age,
    }


def read_stats(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> tuple[list[ReplicaLoad], QueueLoad]:
    """Return the latest figures of each replica that told any, and of the queues, of which all tell alike.

    metrics: name -> replica -> its values of late, as in `AutoscalingContext.raw_metrics`.
    """
    latest = {
        name: {replica: float(values[-1].value) for replica, values in by_replica.items() if values}
        for name, by_replica in metrics.items()
    }
    waits, places, blocks = (latest.get(name, {}) for name in (PREFILL_WAIT, OCCUPANCY, KV_USAGE))
    loads = [ReplicaLoad(waits[one], places[one], blocks[one]) for one in waits if one in places and one in blocks]
    queued, wait, age = (max(latest.get(name, {}).values(), default=0.0) for name in (QUEUED, QUEUE_WAIT, QUEUE_AGE))
    return loads, QueueLoad(round(queued), wait, age)
