"""Sequences that wait to be admitted, in the order in which they may join."""

from __future__ import annotations

import heapq
from collections import OrderedDict

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
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._heap, sequence.order)

    def peek(self) -> Sequence | None:
        """Return the sequence whose turn it is, or None."""
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0]] if self._heap else None

    def waits_since(self) -> float | None:
        """Return when the one that waits longest began to, None if nobody waits."""
        return next(iter(self._members.values())).queued_at if self._members else None

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out, wherever it stands; nothing happens if it does not wait."""
        if sequence not in self:
            return
        del self._members[sequence.order]
        self.num_tokens -= sequence.num_tokens
        if len(self._heap) > 2 * len(self._members) + FEW:
            self._heap = list(self._members)
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the members, their token count and the heap disagree. O(waiting)."""
        if self.num_tokens != sum(sequence.num_tokens for sequence in self._members.values()):
            raise IntegrityError("the waiting queue's token count is wrong")
        if not set(self._members).issubset(self._heap):
            raise IntegrityError("a waiting sequence is not in the heap")
