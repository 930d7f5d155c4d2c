"""`squadron replay`: runs what routers recorded of an incident in a simulator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console

from cluster.simulator.history import Arrive
from cluster.simulator.replay import history_of, outcomes, read
from cluster.simulator.world import run

SAME, BROKEN = 0, 1  # exit codes


def replay(files: list[Path]) -> int:
    """Print the faults that were found, and how requests ended in the incident and here; return the exit code.

    Raises `ConfigError` where a file is no record, and `OSError`.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    records = read(files)
    history = history_of(records)
    for event in history.events:
        if not isinstance(event, Arrive):
            console.print(event)
    outcome = run(history)
    requests = f"{outcome.streams} requests, {outcome.seconds:.1f} s"
    console.print(f"{history.routers} routers, {history.replicas} replicas, {requests}")
    console.print(f"recorded: {_counted(outcomes(records))}")
    console.print(f"replayed: {_counted(Counter(outcome.ends))}")
    for violation in outcome.violations:
        console.print(f"must not be: {violation}")
    return BROKEN if outcome.violations else SAME


def _counted(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "no requests"
