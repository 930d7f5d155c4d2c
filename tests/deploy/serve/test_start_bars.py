"""What `squadron serve` shows of replicas that start, on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from deploy.serve.start_bars import MOST_LINES, start_bars

STATES = [
    {"id": "aaaaaaaaaaaa", "state": "ready", "model": "demo"},
    {"id": "bbbbbbbbbbbb", "state": "starting", "phase": "weights", "share": 0.4, "seconds": 7.2, "model": "demo"},
    {"id": "cccccccccccc", "state": "starting", "phase": "warm-up", "model": "demo"},
    {"id": "", "state": "pending", "model": "demo"},
]


def shown(states, *, terminal: bool = True) -> list[str]:
    """The lines of the last picture."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    with start_bars(console) as bars:
        bars.take([{"id": "old", "state": "starting", "phase": "workers", "model": "demo"}])
        bars.take(states)
        if not terminal:
            return output.getvalue().splitlines()
        output.truncate(0)
        bars._progress.refresh()
        return [" ".join(line.split()) for line in Text.from_ansi(output.getvalue()).plain.splitlines()]


def test_a_line_for_each_replica_that_is_not_ready_with_a_bar_for_its_weights():
    head, loading, warming, waiting = shown(STATES)[-4:]
    assert "Replicas: 1 of 4 ready" in head
    assert "demo bbbbbbbb weights 7 s" in loading
    assert "40%" in loading
    assert "demo cccccccc warm-up" in warming
    assert "%" not in warming.replace("0%", "")
    assert "demo pending" in waiting


def test_many_replicas_do_not_fill_the_screen():
    lines = shown([{"id": f"{i}", "state": "starting", "phase": "weights", "model": "m"} for i in range(20)])
    assert sum(" weights" in line for line in lines) == MOST_LINES
    assert f"and {20 - MOST_LINES} more" in lines[-1]


def test_nothing_is_shown_without_a_terminal():
    assert shown(STATES, terminal=False) == []


def test_what_no_router_has_told_yet_changes_nothing():
    assert "0 of 1 ready" in " ".join(shown([]))
