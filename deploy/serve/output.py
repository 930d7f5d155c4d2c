"""What `squadron serve` says while it comes up: phases with seconds; and what it leaves out of Ray's own words."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console

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


LABELS = {"kv blocks": "KV blocks", "kv_blocks": "KV blocks", "warm_up": "Warm-up"}


class PhaseLog:
    """Prints phases as they end; between them a spinner where there is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.perf_counter()

    def line(self, label: str, seconds: float, note: str = "") -> None:
        """Print one phase."""
        self._console.print(f"{label:<10} {seconds:6.1f} s   {note}".rstrip(), markup=False)

    @contextmanager
    def phase(self, label: str) -> Iterator[list[str]]:
        """Time a phase; strings put on the yielded list become its note. A phase that fails prints nothing."""
        notes: list[str] = []
        began = time.perf_counter()
        with self._console.status(f"{label} ..."):
            yield notes
        self.line(label, time.perf_counter() - began, ", ".join(notes))

    def replicas(self, bodies: Sequence[Mapping[str, Any]], waited: float, ranks: str) -> None:
        """Print the phases that the replicas went through: of each the slowest, for they start side by side.

        waited: seconds until all were ready; what they do not account for went by until their processes ran.
        """
        names = list(dict.fromkeys(name for body in bodies for name in body["phases"]))
        slowest = {name: max(float(body["phases"].get(name, 0.0)) for body in bodies) for name in names}
        self.line("Placement", max(waited - sum(slowest.values()), 0.0), ranks)
        notes = {
            "Weights": "; ".join(dict.fromkeys(str(body["engine"]) for body in bodies)),
            "KV blocks": f"{min(int(body['kv_tokens']) for body in bodies):,} tokens fit in each replica",
        }
        for name, seconds in slowest.items():
            label = LABELS.get(name, name.capitalize())
            self.line(label, seconds, notes.get(label, ""))

    def total(self, note: str) -> None:
        """Print how long all of it took."""
        self.line("Ready", time.perf_counter() - self._began, note)
