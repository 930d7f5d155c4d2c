"""Requests that no replica can take just now, each with the time it may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.router.member import LiveRequest


class WaitingRoom:
    """In order of arrival. `give_up` is called for a request whose time is over; it is still here then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up: Callable[[LiveRequest], None]) -> None:
        self._loop = loop
        self._give_up = give_up
        self._timers: dict[LiveRequest, asyncio.TimerHandle] = {}
        self._since: dict[LiveRequest, float] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def enter(self, live: LiveRequest, seconds: float) -> None:
        """Let a request wait; one that waits already keeps its place and its time."""
        if live not in self._timers:
            self._since[live] = self._loop.time()
            self.stay(live, seconds)

    def stay(self, live: LiveRequest, seconds: float) -> None:
        """Let a request that waits do so for `seconds` from now, in its place."""
        if live in self._timers:
            self._timers[live].cancel()
        self._timers[live] = self._loop.call_later(seconds, self._give_up, live)

    def since(self, live: LiveRequest) -> float:
        """Return when a request that waits began to."""
        return self._since[live]

    def holds(self, live: LiveRequest) -> bool:
        """Whether a request waits here."""
        return live in self._timers

    def leave(self, live: LiveRequest) -> None:
        """Let a request go, if it is here."""
        self._since.pop(live, None)
        timer = self._timers.pop(live, None)
        if timer is not None:
            timer.cancel()

    def waiting(self) -> list[LiveRequest]:
        """Return those that wait, the first one first."""
        return list(self._timers)
