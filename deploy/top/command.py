"""`squadron top`: looks at an app, once or again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from deploy.cli.client import client_for, server_url
from deploy.status.report import Condition
from deploy.top.figures import Picture
from deploy.top.view import lines, screen
from deploy.top.watch import Watch

Sleep = Callable[[float], object]  # until the next look


def show_top(address: str, api_key: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Print what the app does until Ctrl-C, or `once`, and return the exit code: that of the last look's report."""
    console = Console(highlight=False, soft_wrap=False)
    with client_for(server_url(address), api_key) as client:
        return Top(Watch(client, interval), console, interval, as_json).run(once)


class Top:
    """Looks and shows. sleep: waits between looks."""

    def __init__(
        self, watch: Watch, console: Console, interval: float, as_json: bool, sleep: Sleep = time.sleep
    ) -> None:
        self._watch = watch
        self._console = console
        self._interval = interval
        self._as_json = as_json
        self._sleep = sleep

    def run(self, once: bool) -> int:
        """Show pictures and return the exit code. Rates need two looks, so `once` takes as long as the interval."""
        picture = self._watch.look()
        if picture.report.condition is Condition.UNREACHABLE:
            self._show(picture)
            return _exit_code(picture)
        if once:
            self._sleep(self._interval)
            picture = self._watch.look()
            self._show(picture)
            return _exit_code(picture)
        try:
            self._go_on(picture)
        except KeyboardInterrupt:
            return _exit_code(self._watch.look())

    def _go_on(self, picture: Picture) -> NoReturn:
        """Until Ctrl-C. Who lost the app sees it come back."""
        if self._as_json or not self._console.is_terminal:
            while True:
                self._sleep(self._interval)
                self._show(self._watch.look())
        with Live(screen(picture), console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                self._sleep(self._interval)
                live.update(screen(self._watch.look()), refresh=True)

    def _show(self, picture: Picture) -> None:
        if self._as_json:
            print(json.dumps(picture.public()), flush=True)
        elif self._console.is_terminal:
            self._console.print(screen(picture))
        else:
            print("\n".join(lines(picture)), flush=True)


def _exit_code(picture: Picture) -> int:
    code: int = picture.report.condition.value
    return code
