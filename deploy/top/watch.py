"""Looks at an app again and again over HTTP. What stands before the routers chooses which of them answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from deploy.status.command import look
from deploy.status.report import Condition
from deploy.top.figures import Picture
from deploy.top.picture import make_picture
from deploy.top.scrape import Scrape, Window, read_scrape

TRIES = 4  # looks for each router that has not answered yet
FORGOTTEN = 30.0  # seconds after which a router that is not heard of is taken for gone, if looks are not rarer


class Watch:
    """Remembers what each router said last, so that rates are of one router's own counters."""

    def __init__(self, client: httpx.Client, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._forgotten = max(FORGOTTEN, 4 * interval)
        self._last: dict[float, Scrape] = {}
        self._windows: dict[float, Window] = {}

    def look(self) -> Picture:
        """Ask the app, all its routers if they let themselves be met, and return what it does."""
        report, text = look(self._client)
        if text:
            self._note(self._scrapes(text, report.routers or 1))
        elif report.condition is Condition.UNREACHABLE:
            self._last.clear()
            self._windows.clear()
        return make_picture(report, tuple(self._windows.values()))

    def _scrapes(self, text: str, routers: int) -> dict[float, Scrape]:
        first = self._read(text)
        found = {} if first is None else {first.router: first}
        for _ in range(TRIES * (routers - 1)):
            if len(found) >= routers:
                break
            scrape = self._another()
            if scrape is not None:
                found.setdefault(scrape.router, scrape)
        return found

    def _another(self) -> Scrape | None:
        """Whichever router answers; None where the one that was asked has just gone: the next look tells of it."""
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        return self._read(answer.text) if answer.status_code == 200 else None

    def _read(self, text: str) -> Scrape | None:
        """None for what somebody else put in the place of a router's figures, such as a page of a proxy."""
        try:
            return read_scrape(text, self._clock())
        except ValueError:
            return None

    def _note(self, found: dict[float, Scrape]) -> None:
        for router, scrape in found.items():
            before = self._last.get(router)
            if before is not None and scrape.at > before.at:
                self._windows[router] = Window(before, scrape)
            self._last[router] = scrape
        newest = max((scrape.at for scrape in found.values()), default=self._clock())
        gone = [router for router, scrape in self._last.items() if newest - scrape.at > self._forgotten]
        for router in gone:
            del self._last[router]
            self._windows.pop(router, None)
