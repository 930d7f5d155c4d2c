"""How far a batch is: a live bar on a terminal, a plain line now and then elsewhere, and a summary at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cluster.batch.driver import BatchFigures

WINDOW = 30.0  # seconds over which speeds are taken
BAR_WIDTH, LEAST_BAR = 30, 10  # columns
GAP = 2
CUT = ("cached", "running", "bar", "errors", "tokens/s", "ETA")  # in a narrow terminal; the first of them first


class Progress:
    """Takes the figures as they come. interval: seconds between two plain lines."""

    def __init__(self, console: Console, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._interval = interval
        self._clock = clock
        self._seen: deque[tuple[float, BatchFigures]] = deque()
        self._live: Live | None = None
        self._told = float("-inf")
        self._last_told: BatchFigures | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar while entered, where there is a terminal."""
        if not self._console.is_terminal:
            yield
            self._end()
            return
        with Live(console=self._console, refresh_per_second=4, transient=True) as self._live:
            yield
        self._live = None

    def take(self, figures: BatchFigures) -> None:
        """Show the latest figures."""
        now = self._clock()
        self._seen.append((now, figures))
        while now - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        if self._live is not None:
            self._live.update(self._bar(figures))
        elif now - self._told >= self._interval:
            self._told = now
            self._print(figures)

    def texts(self, figures: BatchFigures) -> dict[str, str]:
        """Return what is told of the latest figures, by what it is about."""
        share = figures.cached / figures.prefilled if figures.prefilled else 0.0
        running = f"running {figures.running} on {figures.replicas}" if figures.replicas else "starting replicas"
        texts = {
            "rows": f"rows {figures.done:,}/{figures.rows:,} ({_percent(figures.done, figures.rows)})",
            "errors": f"errors {figures.errors:,}",
            "tokens/s": f"tokens/s {self._per_second(lambda one: one.drawn):,.0f}",
            "cached": f"cached {min(share, 1.0):.0%}",
        }
        return (
            texts
            if figures.done == figures.rows
            else texts | {"running": running, "ETA": f"ETA {self._eta(figures)}"}
        )

    def _end(self) -> None:
        """Tell the end, where no line did: the last one must not read as if rows were missing."""
        if self._seen and self._last_told is not self._seen[-1][1]:
            self._print(self._seen[-1][1])

    def _print(self, figures: BatchFigures) -> None:
        self._last_told = figures
        self._console.print(" | ".join(self.texts(figures).values()))

    def _bar(self, figures: BatchFigures) -> Table:
        """One line of the terminal: a second one would stay behind when the bar goes."""
        parts = {"bar": " " * LEAST_BAR, **self.texts(figures)}
        # Where replicas are still to start, that is the news: it goes last.
        cut = list(CUT) if figures.replicas else [*(name for name in CUT if name != "running"), "running"]
        while (spare := self._console.width - _width(parts)) < 0 and cut:
            parts.pop(cut.pop(0), None)
        bar = ProgressBar(figures.rows, figures.done, width=min(LEAST_BAR + spare, BAR_WIDTH))
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for _ in parts:
            grid.add_column(no_wrap=True)
        grid.add_row(*[bar if name == "bar" else text for name, text in parts.items()])
        return grid

    def _per_second(self, figure: Callable[[BatchFigures], int]) -> float:
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (figure(last) - figure(first)) / (now - began) if now > began else 0.0

    def _eta(self, figures: BatchFigures) -> str:
        speed = self._per_second(lambda one: one.done)
        return str(timedelta(seconds=round((figures.rows - figures.done) / speed))) if speed else "-"


def summary(figures: BatchFigures, errors: Mapping[str, int], seconds: float, replicas: int) -> list[str]:
    """Return the lines that end a batch. errors: rows by code. seconds: of this driver. replicas: that ran it."""
    speed = figures.drawn / figures.seconds if figures.seconds else 0.0
    by_code = ", ".join(f"{count:,} {code}" for code, count in sorted(errors.items()))
    return [
        f"rows      {figures.rows:,}" + (f", of which {figures.errors:,} failed: {by_code}" if errors else ""),
        f"tokens    {figures.prompt_tokens:,} of prompts, {figures.output_tokens:,} of output",
        f"time      {seconds:,.1f} s, of rows {figures.seconds:,.1f} s: {speed:,.0f} tokens/s, "
        f"{speed / replicas:,.0f} a replica",
    ]


def _width(texts: Mapping[str, str]) -> int:
    return sum(len(text) for text in texts.values()) + GAP * (len(texts) - 1)


def _percent(part: int, whole: int) -> str:
    # Not rounded up: all rows are done only when all are.
    return f"{int(1000 * part / whole) / 10 if whole else 100.0:.1f} %"
