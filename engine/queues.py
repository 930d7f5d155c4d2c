"""Sequences that wait to be admitted, in the order in which they may join."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from engine.errors import IntegrityError
from engine.request import Sequence


class WaitingQueue:
    """A heap by `Sequence.order` with removal in O(1): an entry that was removed is skipped when it surfaces.

    A preempted sequence keeps its order, so that it comes back at the head of all that are younger.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Sequence]] = []
        self._members: OrderedDict[Sequence, None] = OrderedDict()  # in the order in which they came
        self.num_tokens = 0  # of all waiting sequences: what is to be computed for them

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait. Raises `IntegrityError` if it does already."""
        if sequence in self._members:
            raise IntegrityError(f"sequence {sequence.order} waits twice")
        self._members[sequence] = None
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """Return the sequence whose turn it is, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def waits_since(self) -> float | None:
        """Return when the one that waits longest began to, None if nobody waits."""
        return next(iter(self._members)).queued_at if self._members else None

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out, wherever it stands; nothing happens if it does not wait."""
        if sequence in self._members:
            del self._members[sequence]
            self.num_tokens -= sequence.num_tokens

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the members, their token count and the heap disagree. O(waiting)."""
        if self.num_tokens != sum(sequence.num_tokens for sequence in self._members):
            raise IntegrityError("the waiting queue's token count is wrong")
        if not set(self._members).issubset(entry[1] for entry in self._heap):
            raise IntegrityError("a waiting sequence is not in the heap")
