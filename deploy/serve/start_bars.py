"""How far replicas are that start: a line for each on a terminal, with a bar while weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

MOST_LINES = 8  # replicas that have one of their own
NAME_CHARACTERS = 8  # of a replica's id
WEIGHTS = "weights"  # the phase whose share replicas report


class StartBars:
    """Shows the `states` of /ready, whenever they are taken. Without a terminal it shows nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        if progress is not None:
            progress.add_task("Replicas ...", total=None)

    def take(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Show what the states say now, in the place of what was shown."""
        progress = self._progress
        if progress is None or not states:
            return
        whole, *others = progress.task_ids
        for task in others:
            progress.remove_task(task)
        ready = sum(state.get("state") == "ready" for state in states)
        progress.update(whole, description=f"Replicas: {ready} of {len(states)} ready")
        starting = [state for state in states if state.get("state") != "ready"]
        for state in starting[:MOST_LINES]:
            loads = state.get("phase") == WEIGHTS
            percent = round(100 * float(state.get("share", 0.0)))
            progress.add_task(_words(state), total=100 if loads else None, completed=percent if loads else 0)
        if len(starting) > MOST_LINES:
            progress.add_task(f"and {len(starting) - MOST_LINES} more", total=None)


@contextmanager
def start_bars(console: Console) -> Iterator[StartBars]:
    """While entered, show bars at the end of what is printed; they go when it is left."""
    if not console.is_terminal:
        yield StartBars(None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield StartBars(progress)


def _words(state: Mapping[str, Any]) -> str:
    name = str(state.get("id", ""))[:NAME_CHARACTERS]
    said = str(state.get("phase", "")).replace("_", " ") or str(state.get("state", ""))
    seconds = float(state.get("seconds", 0.0))
    lasted = f"{seconds:.0f} s" if seconds >= 1 else ""
    return " ".join(filter(None, [str(state.get("model", "")), name, said, lasted]))
