"""Ends the requests whose deadlines pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.router.member import LiveRequest


class DeadlineTimers:
    """One timer for each live request that has a deadline; `expire` is called when it passes. On one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[LiveRequest], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._timers: dict[LiveRequest, asyncio.TimerHandle] = {}

    def watch(self, live: LiveRequest) -> None:
        """Follow a request, if it has a deadline."""
        deadline = live.log.request.deadline
        if deadline is not None:
            self._timers[live] = self._loop.call_at(deadline, self._expire, live)

    def forget(self, live: LiveRequest) -> None:
        """Follow a request no longer."""
        timer = self._timers.pop(live, None)
        if timer is not None:
            timer.cancel()
