"""What `squadron serve` says while it runs: replicas that are lost, are new, sleep or wake up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

ASLEEP = "asleep"
POLLS = 2  # polls in a row that must miss a replica: routers hear of its end at different moments


@dataclass(frozen=True, slots=True)
class Listed:
    """What /ready lists, of all models. replicas: those that are ready. asleep: ids of those that sleep."""

    replicas: list[dict[str, Any]]
    asleep: frozenset[str] = frozenset()


def listed_replicas(client: httpx.Client) -> Listed | None:
    """Ask /ready once, for all models; None where there is no answer."""
    try:
        body = client.get("/ready").json()
    except (httpx.HTTPError, ValueError):
        return None
    replicas = body.get("replicas") if isinstance(body, dict) else None
    if not isinstance(replicas, list):
        return None
    return Listed(replicas, frozenset(one["id"] for one in body.get("states", ()) if one["state"] == ASLEEP))


class ReplicaLog:
    """Compares what /ready lists of a model with what it listed before. `say` is called with one line per change.

    present: the replicas that the start was announced with, as /ready shows them. wanted: how many there should be.
    wait: seconds that requests wait for a replica where none is left. model: its id; "" = all that are listed are of
    one. scaled: their number follows the load, up to `wanted`.
    """

    def __init__(
        self,
        present: list[dict[str, Any]],
        wanted: int,
        say: Callable[[str], None],
        wait: float,
        model: str = "",
        scaled: bool = False,
    ) -> None:
        self._model = model
        self._pids = self._own(present)
        self._missed = dict.fromkeys(self._pids, 0)
        self._asleep: set[str] = set()
        self._wait = wait
        self._wanted = wanted
        self._scaled = scaled
        self._say = say

    def update(self, listed: Listed) -> None:
        """Take in what /ready lists now, of all models."""
        self.compare(self._own(listed.replicas), listed.asleep)

    def compare(self, seen: Mapping[str, list[int]], asleep: Collection[str] = ()) -> None:
        """Take in the replicas, id -> pids by rank, that are ready now, and the ids of those that sleep."""
        there = {*seen, *asleep}
        self._missed = {name: 0 if name in there else missed + 1 for name, missed in self._missed.items()}
        gone = [name for name, missed in self._missed.items() if missed >= POLLS]
        new = [name for name in seen if name not in self._missed]
        left = sum(name in there for name in self._missed)
        for name in gone:
            self._say(f"Replica {self._named(name)} is {self._fate(name, left)}")
            del self._missed[name], self._pids[name]
            self._asleep.discard(name)
        for name in new:
            self._missed[name] = 0
            self._pids[name] = seen[name]
        self._tell_sleep(seen, asleep)
        for name in new:
            self._say(f"Replica {self._named(name)} is ready: {left + len(new)} of {self._wanted}.")

    def _tell_sleep(self, seen: Collection[str], asleep: Collection[str]) -> None:
        for name in self._missed:
            if name in asleep and name not in self._asleep:
                self._asleep.add(name)
                self._say(f"Replica {self._named(name)} sleeps until POST /wake_up.")
            elif name in self._asleep and name in seen and name not in asleep:
                self._asleep.remove(name)
                self._say(f"Replica {self._named(name)} is awake.")

    def _own(self, bodies: list[dict[str, Any]]) -> dict[str, list[int]]:
        return {body["id"]: body["pids"] for body in bodies if not self._model or body["model"] == self._model}

    def _named(self, name: str) -> str:
        pids = self._pids[name]
        of = f" of {self._model}" if self._model else ""
        return f"{name}{of} (pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))})"

    def _fate(self, name: str, left: int) -> str:
        if self._scaled:
            return f"gone; {left} of at most {self._wanted} left."
        if name in self._asleep:
            return "lost while it slept; Ray starts another, which sleeps, too."
        if not left:
            return f"lost; what it ran waits up to {self._wait:g} s for another, which Ray starts."
        if left >= self._wanted:
            return "lost; what it ran goes on elsewhere; another is ready already."
        return f"lost; what it ran goes on elsewhere, {left} of {self._wanted} left. Ray starts another."
