"""How far a batch is: a live bar on a terminal, plain lines elsewhere, then a summary and the first errors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cluster.batch.ledger.ledger import Totals
from cluster.batch.ledger.records import RowDone
from cluster.batch.rows import InputSource
from cluster.batch.run.driver import BatchProgress

WINDOW = 30.0  # seconds over which speeds are taken
BAR_WIDTH, LEAST_BAR = 30, 10  # columns
GAP = 2
CUT = ("cached", "running", "bar", "errors", "tokens/s", "ETA")  # in a narrow terminal; the first of them first
MAX_MESSAGE = 200  # characters of each


class ProgressDisplay:
    """Shows the progress as it comes. interval: seconds between two plain lines."""

    def __init__(self, console: Console, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._interval = interval
        self._clock = clock
        self._seen: deque[tuple[float, BatchProgress]] = deque()
        self._live: Live | None = None
        self._printed_at = float("-inf")
        self._last_printed: BatchProgress | None = None

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

    def take(self, progress: BatchProgress) -> None:
        """Show the latest progress."""
        now = self._clock()
        self._seen.append((now, progress))
        while now - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        if self._live is not None:
            self._live.update(self._bar(progress))
        elif now - self._printed_at >= self._interval:
            self._printed_at = now
            self._print(progress)

    def texts(self, progress: BatchProgress) -> dict[str, str]:
        """Return the text of the latest progress, by its subject."""
        share = progress.cached / progress.prefilled if progress.prefilled else 0.0
        running = f"running {progress.running} on {progress.replicas}" if progress.replicas else "starting replicas"
        texts = {
            "rows": f"rows {progress.done:,}/{progress.rows:,} ({_percent(progress.done, progress.rows)})",
            "errors": f"errors {progress.errors:,}",
            "tokens/s": f"tokens/s {self._per_second(lambda one: one.drawn):,.0f}",
            "cached": f"cached {min(share, 1.0):.0%}",
        }
        return (
            texts
            if progress.done == progress.rows
            else texts | {"running": running, "ETA": f"ETA {self._eta(progress)}"}
        )

    def _end(self) -> None:
        """Tell the end, where no line did: the last one must not read as if rows were missing."""
        if self._seen and self._last_printed is not self._seen[-1][1]:
            self._print(self._seen[-1][1])

    def _print(self, progress: BatchProgress) -> None:
        self._last_printed = progress
        self._console.print(" | ".join(self.texts(progress).values()))

    def _bar(self, progress: BatchProgress) -> Table:
        """One line of the terminal: a second one would stay behind when the bar goes."""
        parts = {"bar": " " * LEAST_BAR, **self.texts(progress)}
        # Where replicas are still to start, that is the news: it goes last.
        cut = list(CUT) if progress.replicas else [*(name for name in CUT if name != "running"), "running"]
        while (spare := self._console.width - _width(parts)) < 0 and cut:
            parts.pop(cut.pop(0), None)
        bar = ProgressBar(progress.rows, progress.done, width=min(LEAST_BAR + spare, BAR_WIDTH))
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for _ in parts:
            grid.add_column(no_wrap=True)
        grid.add_row(*[bar if name == "bar" else text for name, text in parts.items()])
        return grid

    def _per_second(self, figure: Callable[[BatchProgress], int]) -> float:
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (figure(last) - figure(first)) / (now - began) if now > began else 0.0

    def _eta(self, progress: BatchProgress) -> str:
        speed = self._per_second(lambda one: one.done)
        return str(timedelta(seconds=round((progress.rows - progress.done) / speed))) if speed else "-"


def summary(progress: BatchProgress, errors: Mapping[str, int], seconds: float, replicas: int) -> list[str]:
    """Return the lines that end a batch. errors: rows by code. seconds: of this driver. replicas: that ran it."""
    speed = progress.drawn / progress.seconds if progress.seconds else 0.0
    by_code = ", ".join(f"{count:,} {code}" for code, count in sorted(errors.items()))
    return [
        f"rows      {progress.rows:,}" + (f", of which {progress.errors:,} failed: {by_code}" if errors else ""),
        f"tokens    {progress.prompt_tokens:,} of prompts, {progress.output_tokens:,} of output",
        f"time      {seconds:,.1f} s, of rows {progress.seconds:,.1f} s: {speed:,.0f} tokens/s, "
        f"{speed / replicas:,.0f} a replica",
    ]


def _width(texts: Mapping[str, str]) -> int:
    return sum(len(text) for text in texts.values()) + GAP * (len(texts) - 1)


def _percent(part: int, whole: int) -> str:
    # Not rounded up: all rows are done only when all are.
    return f"{int(1000 * part / whole) / 10 if whole else 100.0:.1f} %"


class _Told(msgspec.Struct, frozen=True):
    message: str


class _Body(msgspec.Struct, frozen=True):
    error: _Told


_decode = msgspec.json.Decoder(_Body).decode


def first_failures(source: InputSource, totals: Totals) -> list[str]:
    """Return a line for each of `Totals.first_errors`: where the row lies, and why it failed.

    Reads the input up to the last of them. Raises `InputError` when it cannot be read.
    """
    wanted = {done.row: done for done in totals.first_errors}
    found: list[str] = []
    for row in source.rows() if wanted else ():
        if row.number in wanted:
            found.append(f"{row.place}: {_message(wanted[row.number])}")
            if len(found) == len(wanted):
                break
    return found


def _message(done: RowDone) -> str:
    text = " ".join(_decode(done.body).error.message.split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
