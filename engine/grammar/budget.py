"""What a grammar may cost one request, over all its choices."""

from __future__ import annotations

import threading

from engine.errors import InvalidRequestError

BASE_TIME = 1.0  # seconds of CPU beyond what its tokens bring
# Seconds more for each token: what a mask over 128,000 tokens takes where none is known beforehand.
TOKEN_TIME = 0.002


class GrammarBudget:
    """Seconds of CPU that one request's grammar may use now: each token brings some, up to the base. From any thread.

    What one of its choices uses is taken from all, and so is what it takes to rebuild their states where a request
    goes on that ran elsewhere: an ambiguous grammar, whose every token is dearer than the one before, comes no
    further on a second replica than on the first.
    """

    def __init__(self, base: float = BASE_TIME, each: float = TOKEN_TIME) -> None:
        self._most = self._left = base
        self._each = each
        self._lock = threading.Lock()

    def charge(self, seconds: float, tokens: int = 0) -> None:
        """Take what was used for a mask, or for as many tokens."""
        with self._lock:
            self._left = min(self._most, self._left + tokens * self._each - seconds)

    def check(self) -> None:
        """Raise `InvalidRequestError` once more was used than may be."""
        if self._left < 0:
            raise InvalidRequestError(
                "what the output must match takes too long to check: it is too large, or a text can be read in too "
                "many ways; make it smaller, and write it so that each text can be made in one way only",
                "structured",
                "grammar_too_slow",
            )
