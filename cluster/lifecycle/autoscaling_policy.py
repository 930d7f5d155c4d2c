"""How many replicas are wanted: a pure function of their metrics, and what keeps its answer from flapping.

Four things ask for replicas, each in units of one replica that is used as much as it should be: prompt tokens that
wait to be computed, against the speed at which they are, and the time to the first token that is aimed at; sequences
against places in a step; KV blocks held; and the time that requests wait in the routers. The most demanding counts.
Replicas report the metrics to Serve's controller (`record_autoscaling_stats`), where the policy runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.admission.capacity import QueueState
from cluster.config_values import ScalingSettings
from engine.report import EngineStats

_FULL = 0.8  # share of a replica's places or KV blocks from which on another one is wanted
_SLACK = 1.25  # fewer replicas must have so much room to spare, so that a load on the edge does not flap
_MOST_AT_ONCE = 2.0  # times the replicas that run: what waits in routers says that there are too few, not how many
_GRAIN = 0.25  # seconds between two samples that count
_ROUNDING = 1e-6
PREFILL_WAIT, OCCUPANCY, KV_USAGE = "squadron_prefill_wait", "squadron_occupancy", "squadron_kv_usage"
QUEUED, QUEUE_WAIT, QUEUE_AGE = "squadron_queued", "squadron_queue_wait", "squadron_queue_age"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica. prefill_wait: seconds that its uncomputed prompt tokens take at its speed.

    occupancy: sequences that run or wait there, as a share of those that one step holds; may be above 1.
    kv_usage: share of its KV blocks that are held, 0 to 1.
    """

    prefill_wait: float = 0.0
    occupancy: float = 0.0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What waits in all routers. requests: their number. wait: seconds that it takes to drain, 0 while unknown.

    age: seconds that the first one has waited.
    """

    requests: int = 0
    wait: float = 0.0
    age: float = 0.0


def needed(settings: ScalingSettings, replicas: Sequence[ReplicaLoad], queue: QueueLoad) -> float:
    """Return how many replicas the load asks for, in fractions; 0 only without any. Monotone in each figure."""
    waits = sum(one.prefill_wait for one in replicas) / settings.target_ttft
    places = sum(one.occupancy for one in replicas) / _FULL
    blocks = sum(one.kv_usage for one in replicas) / _FULL
    late = max(queue.wait, queue.age) / settings.target_ttft
    queued = max(min(late, _MOST_AT_ONCE) * len(replicas), 1e-3 if queue.requests else 0.0)
    return max(waits, places, blocks, queued)


class Scaler:
    """Turns samples of the load into decisions. The time is an argument, monotonic seconds.

    Up goes what every sample of the last `upscale_delay_s` asked for; down goes what none of the last
    `downscale_delay_s` would have needed. Each decision begins these times anew, so they are the cool-down as well.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, wanted, enough)
        self._target: int | None = None

    def stay_within(self, min_replicas: int, max_replicas: int) -> None:
        """Go by other bounds from now on. Raises `ConfigError` where they contradict each other."""
        self._settings = replace(self._settings, min_replicas=min_replicas, max_replicas=max_replicas)

    def decide(
        self, now: float, target: int, replicas: Sequence[ReplicaLoad], queue: QueueLoad, missing: int = 0
    ) -> int:
        """Return how many replicas there should be.

        target: how many were asked for before. replicas: those that run and reported metrics; missing: those that
        run and did not, because of which nothing is taken away.
        """
        settings = self._settings
        if target != self._target:  # decided elsewhere: Serve's own start from zero, a new deployment
            self._target = target
            self._samples.clear()
        if not replicas:
            return settings.bounded(target)
        if self._samples and now - self._samples[-1][0] < _GRAIN:
            return settings.bounded(target)
        need = needed(settings, replicas, queue)
        wanted, enough = _whole(need), _whole(need * _SLACK)
        self._samples.append((now, wanted, max(enough, target) if missing else enough))
        chosen = settings.bounded(self._chosen(now, target))
        if chosen != target:
            self._target = chosen
            self._samples.clear()
        return chosen

    def _chosen(self, now: float, target: int) -> int:
        settings = self._settings
        up = self._since(now - settings.upscale_delay_s)
        least = min((wanted for _, wanted, _ in up), default=target)
        if least > target:
            return least
        down = self._since(now - settings.downscale_delay_s)
        most = max((enough for _, _, enough in down), default=target)
        if most < target and target > 1:
            return max(most, 1)
        if target == 1:
            idle = self._since(now - settings.downscale_to_zero_delay_s)
            if idle and not any(enough for _, _, enough in idle):
                return 0
        self._forget(now - max(settings.downscale_delay_s, settings.downscale_to_zero_delay_s))
        return target

    def _since(self, begin: float) -> list[tuple[float, int, int]]:
        """The samples from `begin` on, with the one before them; none where the samples do not reach back so far."""
        if not self._samples or self._samples[0][0] > begin:
            return []
        first = 0
        for number, sample in enumerate(self._samples):
            if sample[0] > begin:
                break
            first = number
        return list(self._samples)[first:]

    def _forget(self, before: float) -> None:
        """Keep one sample that is older than `before`, so that it is known that samples reach back so far."""
        while len(self._samples) > 1 and self._samples[1][0] <= before:
            self._samples.popleft()


def _whole(need: float) -> int:
    return max(1, math.ceil(need - _ROUNDING)) if need > 0 else 0


def replica_stats(stats: EngineStats, max_num_seqs: int, prefill_wait: float, queue: QueueState) -> dict[str, float]:
    """Return a replica's metrics and those of the routers' queues, as it has heard of them."""
    return {
        PREFILL_WAIT: prefill_wait,
        OCCUPANCY: (stats.num_running + stats.num_waiting) / max_num_seqs,
        KV_USAGE: stats.kv_usage,
        QUEUED: float(queue.requests),
        QUEUE_WAIT: queue.tokens / queue.rate if queue.rate else 0.0,
        QUEUE_AGE: queue.age,
    }


def read_stats(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> tuple[list[ReplicaLoad], QueueLoad]:
    """Return the latest metrics of each replica that reported any, and of the queues, which all report alike.

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
