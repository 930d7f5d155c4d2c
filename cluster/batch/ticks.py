"""The beat of a batch: what has come is written down and read by the rows that wait for it, some times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

TICK = 0.05  # seconds: what a killed driver may lose, and what a finished row may wait


class Ticks:
    """Calls each of `on_tick` every `period` seconds and then lets those go on who waited. Used on one event loop."""

    def __init__(self, on_tick: Sequence[Callable[[], None]], period: float = TICK) -> None:
        self._on_tick = on_tick
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self._loop.create_future()

    async def next(self) -> None:
        """Return with the next tick."""
        await asyncio.shield(self._next)  # one who leaves must not take the others along

    async def run(self) -> None:
        """Tick until cancelled. Raises what they raise."""
        while True:
            await asyncio.sleep(self._period)
            for act in self._on_tick:
                act()
            over, self._next = self._next, self._loop.create_future()
            over.set_result(None)
