"""Whose grammar is compiled next: whoever has used the compiler least, of those who wait."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Jobs by owner, each of whom is charged for the time of theirs. Not for several threads at once.

    An owner who comes anew, or again after a pause, stands with those who have used least: what was not used is not
    saved up, and what was used by others before is not owed. So a job waits for one of each other owner at most, or
    for as many short ones as take as long.

    most: jobs of one owner that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[T]] = {}
        self._used: dict[str, float] = {}  # seconds, of owners who are ahead of the least
        self._least = 0.0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, owner: str, job: T) -> bool:
        """Queue a job, unless this owner waits for it already; False if too many of theirs wait."""
        queue = self._queues.get(owner, deque())
        if job in queue:
            return True
        if len(queue) >= self._most:
            return False
        queue.append(job)
        self._queues[owner] = queue
        self._used[owner] = max(self._used.get(owner, 0.0), self._least)
        return True

    def take(self) -> tuple[str, T]:
        """Return the next job and whose it is. Raises `ValueError` if none waits."""
        owner = min(self._queues, key=lambda each: self._used[each])
        self._least = self._used[owner]
        queue = self._queues[owner]
        job = queue.popleft()
        if not queue:
            del self._queues[owner]
        return owner, job

    def charge(self, owner: str, seconds: float) -> None:
        """Note what a job of `owner` took."""
        self._used[owner] = self._used.get(owner, self._least) + seconds
        self._used = {one: used for one, used in self._used.items() if one in self._queues or used > self._least}
