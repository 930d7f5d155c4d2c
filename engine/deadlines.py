"""Which requests have run out of time."""

from __future__ import annotations

import heapq

from engine.request import Request


class Deadlines:
    """The deadlines of requests, soonest first. A request that ended meanwhile is passed over by whoever asks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def watch(self, request: Request) -> None:
        """Remember the request's deadline, if it has one."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.request_id))

    def take_passed(self, now: float) -> list[str]:
        """Return the ids of those whose deadline is over at `now`, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
