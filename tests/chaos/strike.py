"""What is done once, in the middle of streams."""

from __future__ import annotations

import time
from collections.abc import Callable


class Strike:
    """A listener for chunks, whatever they are: calls `action` when `number` of them have come over all streams.

    at: when it struck, monotonic; None until then. A test asserts that it did: streams may end before.
    """

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.at: float | None = None
        self._left = number
        self._action = action

    def struck(self) -> float:
        """Return when it did; fails if it did not."""
        assert self.at is not None, "the streams ended before anything happened"
        return self.at

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self.at = time.monotonic()
            self._action()
