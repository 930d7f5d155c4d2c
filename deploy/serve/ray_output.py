"""Keeps Ray's notices of dead workers off the terminal: a paragraph of ids each, where one line of ours says more."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

DEATH_NOTICE = "A worker died or was killed while executing a task"


class DeathFilter(io.TextIOBase):
    """A text stream that passes whole lines on to `below`, but for Ray's notices of dead workers."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._line = ""
        self._lock = threading.Lock()  # Ray prints from threads of its own

    def write(self, text: str) -> int:
        """Take text; a line goes on when it is complete."""
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            self._below.writelines(f"{line}\n" for line in lines if DEATH_NOTICE not in line)
        return len(text)

    def flush(self) -> None:
        """Flush what went on; without the lock, for a signal handler calls this too."""
        self._below.flush()

    def isatty(self) -> bool:
        """Whether `below` is a terminal."""
        return self._below.isatty()

    def fileno(self) -> int:
        """Return the descriptor of `below`."""
        return self._below.fileno()

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        with self._lock:
            self._below.write(self._line)
            self._line = ""


def quiet_serve(verbose: bool) -> None:
    """Keep what Serve's client logs in this process to errors, unless `verbose`."""
    logging.getLogger("ray.serve").setLevel(logging.INFO if verbose else logging.ERROR)


@contextmanager
def without_death_notices() -> Iterator[None]:
    """While entered, Ray's notices of dead workers do not reach standard output. Ray has no setting for them."""
    quiet = DeathFilter(sys.stdout)
    try:
        with redirect_stdout(quiet):
            yield
    finally:
        quiet.finish()
