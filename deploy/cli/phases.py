"""What the terminal shows while the app comes up: one line per phase, with seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

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

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Show a spinner for phases whose seconds come later."""
        with self._console.status(f"{label} ..."):
            yield

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
