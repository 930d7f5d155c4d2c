"""How fast a queue drains: tokens of work per second, measured while somebody waits."""

from __future__ import annotations

_HALF_LIFE = 5.0  # seconds of waiting after which a measurement counts half
_LEAST = 0.25  # seconds that must have been measured before a rate is told


class DrainRate:
    """Reads a counter of work that only rises. While nobody waits it says nothing about what the replicas could do.

    What was measured in one busy time holds for the next, until that has its own.
    """

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._total = 0
        self._since: float | None = None  # the last look, if somebody has waited since

    def note(self, total: int, now: float, waiting: bool) -> None:
        """Look at the counter. now: seconds, never backwards. waiting: whether somebody waits from now on."""
        if self._since is not None:
            passed = now - self._since
            keep = 0.5 ** (passed / _HALF_LIFE)
            self._work = self._work * keep + total - self._total
            self._seconds = self._seconds * keep + passed
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
