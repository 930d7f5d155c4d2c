"""What was refused a moment ago: demand that no queue shows."""

from __future__ import annotations

from collections import deque

_SECONDS = 3.0  # that a refusal is remembered: longer than between two reports of it


class TurnedAway:
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
