"""An event loop whose clock moves only when nothing else is left to do: hours of waiting pass in no time, exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits: what it would have waited for is added to the clock."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits, and for nothing: the test would hang")
        self.skipped += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 1,000 seconds."""

    def __init__(self) -> None:
        self._skipping = _Selector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return 1000.0 + self._skipping.skipped


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return what it returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
