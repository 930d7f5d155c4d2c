"""How long answers are likely to be, so that a request can be weighed before it runs."""

from __future__ import annotations

from engine.request import Request

_FIRST_GUESS = 256.0  # tokens, until answers were seen
_WEIGHT = 0.05  # of the last answer in the mean


class OutputLength:
    """The mean length of the answers of late. What clients ask for at most is often far more than they get."""

    def __init__(self) -> None:
        self._mean = _FIRST_GUESS

    def seen(self, tokens: int) -> None:
        """Take note of one answer."""
        self._mean += _WEIGHT * (tokens - self._mean)

    def of(self, request: Request, sequences: int) -> int:
        """Return the output tokens to expect of all `sequences` of a request."""
        if request.pooling is not None:
            return 0
        most = request.params.max_tokens
        each = self._mean if most is None else min(self._mean, most)
        return sequences * max(1, round(each))
