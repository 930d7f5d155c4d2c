"""Which requests have run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from engine.request import Request

FEW = 64  # entries that are not worth looking through


class Deadlines:
    """The deadlines of requests, soonest first. is_live: whether a request, this very object, has not ended.

    Nobody tells of requests that end, so theirs are looked for when there may be more dead entries than live ones.
    """

    def __init__(self, is_live: Callable[[Request], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()  # of entries, so that equal deadlines never compare requests
        self._most = FEW

    def __len__(self) -> int:
        """Return the number of entries: at most twice those that lived when the dead were dropped last, and a few."""
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Remember the deadline of a live request, if it has one."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, next(self._numbers), request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2])]
            heapq.heapify(self._heap)
            self._most = max(FEW, 2 * len(self._heap))

    def take_passed(self, now: float) -> list[Request]:
        """Return the live requests whose deadline is over at `now`, and forget them."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[2])
        return [request for request in passed if self._is_live(request)]
