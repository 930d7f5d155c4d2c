"""How much one router may hand to the replicas: enough that no step waits for it, and hardly more.

What waits inside a replica waits in order of arrival, out of reach of fairness and of the bounds on waiting. So only
a little more goes in than runs there: what ends within `_AHEAD` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

UNBOUNDED = 2**62
_AHEAD = 0.1  # seconds: longer than a step and the way from replica to router and back
_LEAST_AHEAD = 2
_SHARE_AHEAD = 8  # of the sequences of a step, one in so many at least: replicas are never filled quite evenly
_WINDOW = 1.0  # seconds over which ends are counted
_FRESH = 0.02  # seconds that an answer of the replicas is good for


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """What the replicas hold, all together. replicas: their number. kv_tokens: tokens of their KV caches."""

    replicas: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class RoomConfig:
    """max_num_seqs / max_num_batched_tokens: of one replica's step.

    max_inflight / max_inflight_tokens: what to answer instead; None = as the replicas are.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_inflight: int | None = None
    max_inflight_tokens: int | None = None


class Room:
    """Bounds of one gate, in sequences and in tokens.

    replicas: asked now and then; None = there is none, and as much may wait inside as one of them will take. So the
    bounds hold in every state. ended: how many requests have ended so far. routers: among how many the room is
    shared, asked now and then.
    """

    def __init__(
        self,
        config: RoomConfig,
        replicas: Callable[[], ReplicaRoom | None],
        ended: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        routers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._ended = ended
        self._clock = clock
        self._looked = clock()
        self._seen = ended()
        self._pace = 0.0  # requests that end in a second
        self._asked = float("-inf")
        self._room = ReplicaRoom(1, 0)
        self._routers = routers
        self._sharers = 1

    def sequences(self) -> int:
        """Return how many sequences may be inside."""
        config, room = self._config, self._present()
        if config.max_inflight is not None:
            return config.max_inflight
        running = max(1, room.replicas * config.max_num_seqs // self._sharers)
        ahead = max(_LEAST_AHEAD, running // _SHARE_AHEAD, round(self._ends_per_second() * _AHEAD))
        return running + min(running, ahead)

    def tokens(self) -> int:
        """Return how many tokens of prompts and expected output may be inside."""
        config, room = self._config, self._present()
        if config.max_inflight_tokens is not None:
            return config.max_inflight_tokens
        return max(1, (room.kv_tokens + room.replicas * config.max_num_batched_tokens) // self._sharers)

    def _present(self) -> ReplicaRoom:
        now = self._clock()
        if now - self._asked >= _FRESH:
            known = self._room
            self._asked = now
            self._room = self._replicas() or ReplicaRoom(1, known.kv_tokens // known.replicas)
            self._sharers = max(1, self._routers())
        return self._room

    def _ends_per_second(self) -> float:
        now = self._clock()
        passed = now - self._looked
        if passed >= _WINDOW:
            ended = self._ended()
            self._pace = (ended - self._seen) / passed
            self._looked, self._seen = now, ended
        return self._pace
