"""What commands print to: a terminal for people, or lines of JSON for collectors of logs."""

from __future__ import annotations

import logging
from typing import Any

from rich.console import Console
from rich.text import Text

from cluster.telemetry.logs import JsonLines

NAME = "squadron.serve"


class JsonConsole(Console):
    """A console whose every print is one JSON object, like the lines that the other processes log."""

    def __init__(self) -> None:
        super().__init__(force_terminal=False, highlight=False, soft_wrap=True)
        self._lines = JsonLines()

    def print(self, *objects: Any, markup: bool | None = None, **_: Any) -> None:
        """Print the text of `objects` as the message of one line."""
        message = " ".join([_plain(one, markup is not False) for one in objects]).strip()
        level = logging.WARNING if message.startswith("Warning:") else logging.INFO
        record = logging.LogRecord(NAME, level, __file__, 0, "%s", (message,), None)
        self.file.write(self._lines.format(record) + "\n")
        self.file.flush()


def _plain(printed: Any, markup: bool) -> str:
    if isinstance(printed, Text):
        return printed.plain
    return Text.from_markup(str(printed)).plain if markup else str(printed)


def terminal(json_lines: bool) -> Console:
    """Return where to print."""
    return JsonConsole() if json_lines else Console(highlight=False, soft_wrap=True)


GIB = 1 << 30
MIB = 1 << 20


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"
