"""The beat of a batch: what has come is written down, and rows read it, some times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

TICK = 0.05  # seconds: what a killed driver may lose, and what a finished row may wait


class Ticks:
    """Every `period` seconds: asks all that wait whether they are due, calls each of `on_tick`, lets the due go on.

    Used on one event loop.
    """

    def __init__(self, on_tick: Sequence[Callable[[], None]], period: float = TICK) -> None:
        self._on_tick = on_tick
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def until(self, due: Callable[[], bool]) -> None:
        """Return after the first tick at which `due()` is true; it is asked once a tick."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = due
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    async def run(self) -> None:
        """Tick until cancelled. Raises what they raise."""
        while True:
            await asyncio.sleep(self._period)
            over = [future for future, due in self._waiting.items() if due()]
            for act in self._on_tick:
                act()
            for future in over:
                # One at a time: making the text of many rows that end at once must not keep the next ones waiting.
                await asyncio.sleep(0)
                if not future.done():
                    future.set_result(None)
