"""Sequences that wait for a place in the batch, in order, and the deadlines of requests."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import IntegrityError
from engine.request import Sequence

FEW = 64  # entries that are not worth looking through

Order = tuple[float, ...]


class WaitingQueue:
    """A heap of orders, which are unique, with removal in O(1): an order whose sequence left is skipped at the top.

    Those that do not get there, behind a head that waits, are dropped once they are more than those of the living.
    The heap holds no sequence, so nothing of a request that ended stays. A preempted sequence keeps its order, so
    that it comes back at the head of all that are younger.
    """

    def __init__(self) -> None:
        self._heap: list[Order] = []
        self._members: OrderedDict[Order, Sequence] = OrderedDict()  # in the order in which they came
        self.num_tokens = 0  # of all waiting sequences: what is to be computed for them

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._members.get(sequence.order) is sequence

    @property
    def num_entries(self) -> int:
        """Entries of the heap: at most twice as many as sequences wait, and a few."""
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait. Raises `IntegrityError` if it does already."""
        if sequence.order in self._members:
            raise IntegrityError(f"sequence {sequence.order} waits twice")
        self._members[sequence.order] = sequence
        self.num_tokens += sequence.num_known
        heapq.heappush(self._heap, sequence.order)

    def peek(self) -> Sequence | None:
        """Return the first sequence, or None."""
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0]] if self._heap else None

    def waits_since(self) -> float | None:
        """Return when the sequence that waits longest began to, None if none waits."""
        return next(iter(self._members.values())).queued_at if self._members else None

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out, wherever it stands; nothing happens if it does not wait."""
        if sequence not in self:
            return
        del self._members[sequence.order]
        self.num_tokens -= sequence.num_known
        if len(self._heap) > 2 * len(self._members) + FEW:
            self._heap = list(self._members)
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the members, their token count and the heap disagree. O(waiting)."""
        if self.num_tokens != sum(sequence.num_known for sequence in self._members.values()):
            raise IntegrityError("the waiting queue's token count is wrong")
        if not set(self._members).issubset(self._heap):
            raise IntegrityError("a waiting sequence is not in the heap")


class Deadlines:
    """The deadlines of requests, soonest first, with their ids and numbers; holds nothing else of them.

    is_live: whether the request of an id and a number, which is unique, has not ended.

    A request that ends leaves its entry here; dead entries are dropped when they may be more than the live ones.
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
