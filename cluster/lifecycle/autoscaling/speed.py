"""How fast an engine computes when it has enough to do."""

from __future__ import annotations

_WINDOW = 0.2  # seconds of computing that make one measurement
_HALF_LIFE = 600.0  # seconds of computing after which a peak counts half


class StepSpeed:
    """The peak of tokens per second of computing, prompt and output, over the last minutes of work.

    A peak and not a mean: a step of few sequences computes few tokens in nearly the time of many, and says nothing
    about how fast a waiting prompt would be done.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._peak = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take note of a step."""
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= _WINDOW:
            fallen = self._peak * 0.5 ** (self._seconds / _HALF_LIFE)
            self._peak = max(fallen, self._tokens / self._seconds)
            self._tokens, self._seconds = 0, 0.0

    def seconds_for(self, tokens: int) -> float:
        """Return how long so many tokens take; 0 while the speed is not known."""
        return tokens / self._peak if self._peak else 0.0
