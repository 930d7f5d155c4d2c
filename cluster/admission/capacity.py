"""What admission goes by: room for more in the replicas, the rate at which a queue drains, likely lengths of answers.

A router hands to the replicas so much that no step waits for it, and hardly more. What waits inside a replica waits
in order of arrival, out of reach of fairness and of the bounds on waiting. So only a little more goes in than runs
there: what ends within `_AHEAD` seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.request import Request

UNBOUNDED = 2**62
_AHEAD = 0.1  # seconds: longer than a step and the way from replica to router and back
_LEAST_AHEAD = 2
_SHARE_AHEAD = 8  # of the sequences of a step, one in so many at least: replicas are never filled quite evenly
_WINDOW = 1.0  # seconds over which ends are counted
_FRESH = 0.02  # seconds that an answer of the replicas is good for
_HALF_LIFE = 5.0  # seconds of waiting after which a measurement counts half
_LEAST = 0.25  # seconds that must have been measured before a rate is known
_FORESIGHT = 20  # a wait is foretold for at most so many times as long as was measured
_FIRST_GUESS = 256.0  # tokens, until answers were seen
_WEIGHT = 0.05  # of the last answer in the mean
_SECONDS = 3.0  # that a refusal is remembered: longer than between two reports of it


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What the replicas hold, all together. replicas: their number. kv_tokens: tokens of their KV caches."""

    replicas: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class InflightConfig:
    """max_num_seqs / max_num_batched_tokens: of one replica's step.

    max_inflight / max_inflight_tokens: what to answer instead; None = as the replicas are.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_inflight: int | None = None
    max_inflight_tokens: int | None = None


class InflightBounds:
    """Bounds of one admission queue, in sequences and in tokens.

    replicas: asked now and then; None = there is none, and as much may wait inside as one of them will take. So the
    bounds hold in every state. ended: how many requests have ended so far. routers: among how many the room is
    shared, asked now and then.
    """

    def __init__(
        self,
        config: InflightConfig,
        replicas: Callable[[], ReplicaCapacity | None],
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
        self._room = ReplicaCapacity(1, 0)
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

    def _present(self) -> ReplicaCapacity:
        now = self._clock()
        if now - self._asked >= _FRESH:
            known = self._room
            self._asked = now
            self._room = self._replicas() or ReplicaCapacity(1, known.kv_tokens // known.replicas)
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


@dataclass(frozen=True, slots=True)
class QueueState:
    """What waits in an admission queue. tokens: of prompts and expected output.

    age: seconds that the first has waited. rate: tokens per second that the queue drains by, 0 = not known.
    """

    requests: int = 0
    tokens: int = 0
    age: float = 0.0
    rate: float = 0.0


def together(queues: Iterable[QueueState]) -> QueueState:
    """Return the state of all queues as of one."""
    all_of_them = list(queues)
    return QueueState(
        sum(one.requests for one in all_of_them),
        sum(one.tokens for one in all_of_them),
        max((one.age for one in all_of_them), default=0.0),
        sum(one.rate for one in all_of_them),
    )


class DrainRate:
    """Reads a counter of work that only rises. While nothing waits it says nothing about what the replicas could do.

    What was measured in one busy time holds for the next, until that has its own.
    """

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._measured = 0.0  # seconds in all, of which none counts half
        self._total = 0
        self._since: float | None = None  # the last look, if something has waited since

    def note(self, total: int, now: float, waiting: bool) -> None:
        """Look at the counter. now: seconds, never backwards. waiting: whether something waits from now on."""
        if self._since is not None:
            passed = now - self._since
            keep = 0.5 ** (passed / _HALF_LIFE)
            self._work = self._work * keep + total - self._total
            self._seconds = self._seconds * keep + passed
            self._measured += passed
        self._total = total
        self._since = now if waiting else None

    @property
    def per_second(self) -> float | None:
        """Tokens per second, None while that is not known."""
        return self._work / self._seconds if self._seconds >= _LEAST and self._work > 0 else None

    def seconds_for(self, work: int) -> float | None:
        """Return how long so much work takes, None while that is not known."""
        rate = self.per_second
        return None if rate is None else work / rate

    def foretold(self, work: int) -> float | None:
        """Return how much of the time that so much work takes is certain enough to refuse it for.

        Of a wait that is long beside what was measured only a part is: a moment in which little was done, one long
        prompt or a slow network, is no reason to refuse whoever would wait for a minute.
        """
        seconds = self.seconds_for(work)
        return None if seconds is None else min(seconds, _FORESIGHT * self._measured)


class OutputLength:
    """The mean length of the answers of late. What clients ask for at most is often far more than they get."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS

    def seen(self, tokens: int) -> None:
        """Take note of one answer."""
        self._mean += _WEIGHT * (tokens - self._mean)

    def of(self, request: Request, sequences: int) -> int:
        """Return the output tokens to expect of all `sequences` of a request."""
        if request.pooling is not None:
            return 0
        most = request.params.max_tokens
        each = self._mean if most is None else min(self._mean, most)
        return sequences * max(1, round(each))


class RecentRefusals:
    """Refused requests and their tokens of work, summed up by tenths of a second. now: seconds, never backwards."""

    def __init__(self) -> None:
        self._sums: deque[tuple[int, int, int]] = deque()  # (tenth, requests, work)

    def add(self, now: float, work: int) -> None:
        """Take note of one refusal."""
        tenth, requests, known = int(now * 10), 0, 0
        if self._sums and self._sums[-1][0] == tenth:
            _, requests, known = self._sums.pop()
        self._sums.append((tenth, requests + 1, known + work))
        self._forget(now)

    def of_late(self, now: float) -> tuple[int, int]:
        """Return the requests that were refused of late, and their work."""
        self._forget(now)
        return sum(requests for _, requests, _ in self._sums), sum(work for _, _, work in self._sums)

    def _forget(self, now: float) -> None:
        while self._sums and self._sums[0][0] < (now - _SECONDS) * 10:
            self._sums.popleft()
