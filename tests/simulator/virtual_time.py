"""An event loop whose clock jumps: nothing waits, everything happens in the order in which it would have."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")
_OTHERS = 1.0  # seconds of real time given to threads when nothing else is left to happen


class _Skipping(selectors.SelectSelector):
    """Passes over the time that it is asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            return super().select(_OTHERS)
        self.now += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. For programs without sockets: what other processes do takes no time here."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    @override
    def time(self) -> float:
        return self._skipping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop of its own in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
