"""`squadron top`: reads an app's /metrics, once or again and again. A proxy chooses which router answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import httpx
from rich.console import Console
from rich.live import Live

from deploy.cli.client import NoAnswerError, ask, client_for, server_url
from deploy.cli.look import console_for_reports, show
from deploy.status import fetch_with_metrics
from deploy.top.picture import Picture, make_picture
from deploy.top.scrape import Scrape, Window, read_scrape
from deploy.top.view import lines, screen

TRIES = 4  # requests for each router that has not answered yet
FORGOTTEN = 30.0  # seconds without an answer after which a router counts as gone, unless polls are rarer


class Watch:
    """Keeps each router's last metrics, so that rates come from one router's own counters."""

    def __init__(self, client: httpx.Client, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._forgotten = max(FORGOTTEN, 4 * interval)
        self._last: dict[float, Scrape] = {}
        self._windows: dict[float, Window] = {}

    def poll(self) -> Picture:
        """Ask the app, and all its routers as far as the proxy reaches them, and return what it does."""
        report, text = fetch_with_metrics(self._client)
        if text:
            self._note(self._scrapes(text, report.routers or 1))
        elif not report.condition.told:
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
        """Whichever router answers; None if it has just gone: the next poll shows that."""
        try:
            answer = ask(self._client, "/metrics")
        except NoAnswerError:
            return None
        return self._read(answer.text) if answer.status_code == 200 else None

    def _read(self, text: str) -> Scrape | None:
        """Parse a router's metrics; None for any other page, such as a proxy's."""
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


Sleep = Callable[[float], object]  # until the next poll


def show_top(address: str, api_key: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Print what the app does until Ctrl-C, or `once`, and return the exit code: that of the last report."""
    console = console_for_reports()
    with client_for(server_url(address), api_key) as client:
        return Top(Watch(client, interval), console, interval, as_json).run(once)


class Top:
    """Polls and shows. sleep: waits between polls."""

    def __init__(
        self, watch: Watch, console: Console, interval: float, as_json: bool, sleep: Sleep = time.sleep
    ) -> None:
        self._watch = watch
        self._console = console
        self._interval = interval
        self._as_json = as_json
        self._sleep = sleep

    def run(self, once: bool) -> int:
        """Show pictures and return the exit code. Rates need two polls, so `once` takes as long as the interval."""
        picture = self._watch.poll()
        if not picture.report.condition.told:
            self._show(picture)
            return _exit_code(picture)
        if once:
            self._sleep(self._interval)
            picture = self._watch.poll()
            self._show(picture)
            return _exit_code(picture)
        try:
            self._go_on(picture)
        except KeyboardInterrupt:
            return _exit_code(self._watch.poll())

    def _go_on(self, picture: Picture) -> NoReturn:
        """Poll until Ctrl-C; an app that went away and comes back is shown again."""
        if self._as_json or not self._console.is_terminal:
            while True:
                self._sleep(self._interval)
                self._show(self._watch.poll())
        with Live(screen(picture), console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                self._sleep(self._interval)
                live.update(screen(self._watch.poll()), refresh=True)

    def _show(self, picture: Picture) -> None:
        show(self._console, self._as_json, picture.public(), screen(picture), lines(picture))


def _exit_code(picture: Picture) -> int:
    code: int = picture.report.condition.value
    return code
