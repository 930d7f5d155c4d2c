"""What `squadron serve` says while it runs: replicas that are lost or new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

POLLS = 2  # polls in a row that must miss a replica: routers hear of its end at different moments


def listed_replicas(client: httpx.Client) -> list[dict[str, Any]] | None:
    """Ask /ready once, for all models; None where there is no answer."""
    try:
        body = client.get("/ready").json()
    except (httpx.HTTPError, ValueError):
        return None
    replicas = body.get("replicas") if isinstance(body, dict) else None
    return replicas if isinstance(replicas, list) else None


class ReplicaLog:
    """Compares what /ready lists of a model with what it listed before. `say` is called with one line per change.

    present: the replicas that the start was announced with, as /ready shows them. wanted: how many there should be.
    model: its id; "" = all that are listed are of one. scaled: their number follows the load, up to `wanted`.
    """

    def __init__(
        self,
        present: list[dict[str, Any]],
        wanted: int,
        say: Callable[[str], None],
        model: str = "",
        scaled: bool = False,
    ) -> None:
        self._model = model
        self._pids = self._own(present)
        self._missed = dict.fromkeys(self._pids, 0)
        self._wanted = wanted
        self._scaled = scaled
        self._say = say

    def update(self, listed: list[dict[str, Any]]) -> None:
        """Take in what /ready lists now, of all models."""
        self.compare(self._own(listed))

    def compare(self, seen: Mapping[str, list[int]]) -> None:
        """Take in the replicas, id -> pids by rank, that are ready now."""
        self._missed = {name: 0 if name in seen else missed + 1 for name, missed in self._missed.items()}
        gone = [name for name, missed in self._missed.items() if missed >= POLLS]
        new = [name for name in seen if name not in self._missed]
        for name in gone:
            del self._missed[name]
        for name in new:
            self._missed[name] = 0
            self._pids[name] = seen[name]
        left = len(seen) - len(new)
        for name in gone:
            if self._scaled:
                self._say(f"Replica {self._named(name)} is gone; {left} of at most {self._wanted} left.")
            else:
                self._say(f"Replica {self._named(name)} is lost; {self._consequence(left)}")
            del self._pids[name]
        for name in new:
            self._say(f"Replica {self._named(name)} is ready: {len(seen)} of {self._wanted}.")

    def _own(self, bodies: list[dict[str, Any]]) -> dict[str, list[int]]:
        return {body["id"]: body["pids"] for body in bodies if not self._model or body["model"] == self._model}

    def _named(self, name: str) -> str:
        pids = self._pids[name]
        of = f" of {self._model}" if self._model else ""
        return f"{name}{of} (pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))})"

    def _consequence(self, left: int) -> str:
        if not left:
            return "what it ran waits up to 30 s for another, which Ray starts."
        if left >= self._wanted:
            return "what it ran goes on elsewhere; another is ready already."
        return f"what it ran goes on elsewhere, {left} of {self._wanted} left. Ray starts another."
