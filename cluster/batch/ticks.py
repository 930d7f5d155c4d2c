"""The beat of a batch: what has come is written down and read by the rows that wait for it, some times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK = 0.05  # seconds: what a killed driver may lose, and what a finished row may wait


class Ticks:
    """Calls `on_tick` every `TICK` seconds and then lets those go on who waited. Used on one event loop."""

    def __init__(self, on_tick: Callable[[], None], period: float = TICK) -> None:
        self._on_tick = on_tick
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self._loop.create_future()

    def next(self) -> asyncio.Future[None]:
        """Return what is done with the next tick."""
        return self._next

    async def run(self) -> None:
        """Tick until cancelled. Raises what `on_tick` raises."""
        while True:
            await asyncio.sleep(self._period)
            self._on_tick()
            over, self._next = self._next, self._loop.create_future()
            over.set_result(None)
