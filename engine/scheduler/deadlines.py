"""Which requests have run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

FEW = 64  # entries that are not worth looking through


class Deadlines:
    """The deadlines of requests, soonest first, by their ids and numbers; nothing else of them is held.

    is_live: whether the request of an id and a number, which no other one ever has, has not ended.

    Nobody tells of requests that end, so theirs are looked for when there may be more dead entries than live ones.
    """

    def __init__(self, is_live: Callable[[str, int], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, str]] = []
        self._most = FEW

    def __len__(self) -> int:
        """Return the number of entries: at most twice those that lived when the dead were dropped last, and a few."""
        return len(self._heap)

    def watch(self, deadline: float, request_id: str, number: int) -> None:
        """Remember the deadline of a live request, in seconds."""
        heapq.heappush(self._heap, (deadline, number, request_id))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2], entry[1])]
            heapq.heapify(self._heap)
            self._most = max(FEW, 2 * len(self._heap))

    def take_passed(self, now: float) -> list[str]:
        """Return the ids of the live requests whose deadline is over at `now`, and forget them."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, number, request_id = heapq.heappop(self._heap)
            if self._is_live(request_id, number):
                passed.append(request_id)
        return passed
