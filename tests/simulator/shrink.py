"""Makes a failing history as short as it can be, and writes it as a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from cluster.simulator.history import Arrive, Drain, Event, History, Sleep

PLAIN: dict[str, Any] = {"pace": 0.0, "leaves": None, "choices": 1, "prompt": 2, "silently": False,
    "timeout": None, "seeded": True, "chat": False, "limited": False, "kept": False,
    "upload": False, "protocol": 1}  # fmt: skip
MOST_RUNS = 600


def shrunk(history: History, fails: Callable[[History], bool], most_runs: int = MOST_RUNS) -> History:
    """Return the shortest history found that still fails. most_runs: of histories, in all."""
    runs = 0
    shorter = True
    while shorter and runs < most_runs:
        shorter = False
        for candidate in _shorter(history):
            runs += 1
            if runs > most_runs:
                break
            if fails(candidate):
                history, shorter = candidate, True
                break
    return history


def _shorter(history: History) -> Iterator[History]:
    """Yield histories that say less: many events fewer first, then one, then plainer events and fewer processes."""
    count = len(history.events)
    size = count // 2
    while size:
        for first in range(0, count, size):
            yield history.without(set(range(first, min(first + size, count))))
        size //= 2
    if history.real_engine and not any(isinstance(one, Sleep) for one in history.events):
        yield replace(history, real_engine=False)
    if history.updated:
        yield replace(history, updated=0)
    if history.scaling is not None:
        yield replace(history, scaling=None)
    if history.quota is not None:
        yield replace(history, quota=None)
    if history.clocks:
        yield replace(history, clocks=0.0)
    if history.gateway:
        yield replace(history, gateway=False)
    for number, event in enumerate(history.events):
        for plainer in _plainer(event):
            events = (*history.events[:number], plainer, *history.events[number + 1 :])
            yield replace(history, events=events)
    if history.replicas > 1:
        yield _without_place(history, f"replica-{history.replicas - 1}", replicas=history.replicas - 1)
    if history.routers > 1:
        yield _without_place(history, f"router-{history.routers - 1}", routers=history.routers - 1)


def _plainer(event: Event) -> Iterator[Event]:
    for name, value in PLAIN.items():
        if hasattr(event, name) and getattr(event, name) != value:
            yield replace(event, **{name: value})
    if isinstance(event, Arrive) and event.tokens > 1:
        yield replace(event, tokens=event.tokens // 2)
    if isinstance(event, Drain) and event.version != 1:
        yield replace(event, version=1)


def _without_place(history: History, place: str, **changes: int) -> History:
    def is_there(event: Event) -> bool:
        return place in {getattr(event, name, None) for name in ("process", "router", "replica")}

    return replace(history, events=tuple(one for one in history.events if not is_there(one)), **changes)


def as_test(history: History) -> str:
    """Return the source of a test that runs the history."""
    events = "".join(f"            {one!r},\n" for one in history.events)
    given = [f"{one.name}={getattr(history, one.name)!r}" for one in fields(history) if one.name != "events"]
    return (
        f"def test_history_{history.seed}() -> None:\n"
        f"    history = History(\n        {', '.join(given)},\n        events=(\n{events}        ),\n    )\n"
        f"    assert run(history).violations == ()\n"
    )
