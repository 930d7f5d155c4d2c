"""How many replicas are wanted: a pure function of their figures, and what keeps its answer from flapping.

Four things ask for replicas, each in units of one replica that is used as much as it should be: prompt tokens that
wait to be computed, against the speed at which they are, and the time to the first token that is aimed at; sequences
against places in a step; KV blocks held; and the time that requests wait in the routers. The most demanding counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError

_FULL = 0.8  # share of a replica's places or KV blocks from which on another one is wanted
_SLACK = 1.25  # fewer replicas must have so much room to spare, so that a load on the edge does not flap
_MOST_AT_ONCE = 2.0  # times the replicas that run: what waits in routers says that there are too few, not how many
_GRAIN = 0.25  # seconds between two looks that count
_ROUNDING = 1e-6


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


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Bounds and times, spelled as in Ray Serve's `AutoscalingConfig`; seconds. Raises `ConfigError`.

    target_ttft: time to the first token that is aimed at. upscale_delay_s / downscale_delay_s: how long a change must
    have been wanted without a break; downscale_to_zero_delay_s: the same for the last replica.
    """

    min_replicas: int
    max_replicas: int
    target_ttft: float
    upscale_delay_s: float
    downscale_delay_s: float
    downscale_to_zero_delay_s: float

    def __post_init__(self) -> None:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ConfigError(
                f"max_replicas must be at least 1 and at least min_replicas ({self.min_replicas}), "
                f"not {self.max_replicas}",
                "max_replicas",
            )

    def bounded(self, replicas: int) -> int:
        """Return the nearest number of replicas that is allowed."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


def needed(settings: ScalingSettings, replicas: Sequence[ReplicaLoad], queue: QueueLoad) -> float:
    """Return how many replicas the load asks for, in fractions; 0 only without any. Monotone in each figure."""
    waits = sum(one.prefill_wait for one in replicas) / settings.target_ttft
    places = sum(one.occupancy for one in replicas) / _FULL
    blocks = sum(one.kv_usage for one in replicas) / _FULL
    late = max(queue.wait, queue.age) / settings.target_ttft
    queued = max(min(late, _MOST_AT_ONCE) * len(replicas), 1e-3 if queue.requests else 0.0)
    return max(waits, places, blocks, queued)


class Scaler:
    """Turns looks at the load into decisions. The time is told to it, monotonic seconds.

    Up goes what every look of the last `upscale_delay_s` asked for; down goes what none of the last
    `downscale_delay_s` would have needed. Each decision begins these times anew, so they are the cool-down as well.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._looks: deque[tuple[float, int, int]] = deque()  # (when, wanted, enough)
        self._target: int | None = None

    def decide(
        self, now: float, target: int, replicas: Sequence[ReplicaLoad], queue: QueueLoad, missing: int = 0
    ) -> int:
        """Return how many replicas there should be.

        target: how many were asked for before. replicas: those that run and told their figures; missing: those that
        run and did not, because of which nothing is taken away.
        """
        settings = self._settings
        if target != self._target:  # somebody else decided: Serve's own start from zero, a new deployment
            self._target = target
            self._looks.clear()
        if not replicas:
            return settings.bounded(target)
        if self._looks and now - self._looks[-1][0] < _GRAIN:
            return settings.bounded(target)
        need = needed(settings, replicas, queue)
        wanted, enough = _whole(need), _whole(need * _SLACK)
        self._looks.append((now, wanted, max(enough, target) if missing else enough))
        chosen = settings.bounded(self._chosen(now, target))
        if chosen != target:
            self._target = chosen
            self._looks.clear()
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
        """The looks from `begin` on, with the one before them; none where the looks do not reach back so far."""
        if not self._looks or self._looks[0][0] > begin:
            return []
        first = 0
        for number, look in enumerate(self._looks):
            if look[0] > begin:
                break
            first = number
        return list(self._looks)[first:]

    def _forget(self, before: float) -> None:
        """Keep one look that is older than `before`, so that it is known that looks reach back so far."""
        while len(self._looks) > 1 and self._looks[1][0] <= before:
            self._looks.popleft()


def _whole(need: float) -> int:
    return max(1, math.ceil(need - _ROUNDING)) if need > 0 else 0
