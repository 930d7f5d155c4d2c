"""What random runs have in common: victims that a seed chooses, and what became of the streams meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.chaos.invariants import Invariants
from tests.chaos.streams import WHOLE, Stream, client_of
from tests.e2e.harness import (
    App,
    kill,
    replica_processes,
    router_processes,
    routers_running,
    worker_processes,
)

SHOWN = 5  # broken rules that a report spells out
BACK = 120.0  # seconds after which a service counts as not recovered
SAME, DIFFERS = "same", "differs"
RANK, REPLICA, ROUTER = "rank", "replica", "router"
VICTIMS = {RANK: worker_processes, REPLICA: replica_processes, ROUTER: router_processes}


@dataclass(slots=True)
class Siege:
    """The report of a run.

    moments: when each of the `victims` was killed, monotonic. back: seconds until the app was whole again.
    samples / missed: how often the invariants were looked at, and looks that brought nothing.
    """

    seed: int
    victims: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    samples: int = 0
    missed: list[str] = field(default_factory=list)

    def count(self, stream: Stream, undisturbed: Stream) -> None:
        """Add what a client has of a stream."""
        self.outcomes[verdict(stream, undisturbed)] += 1
        self.faults += stream.faults
        if stream.error is not None:
            self.errors[stream.error["code"]] += 1

    async def kill_one(self, app: App, rng: Random, kinds: Sequence[str] = (RANK, REPLICA)) -> None:
        """Kill a process of one of the `kinds`, and wait until the app is whole again."""
        name, routers = rng.choice(sorted(kinds)), len(router_processes())
        victim = rng.choice(VICTIMS[name]())
        self.victims.append(name)
        self.moments.append(time.monotonic())
        kill(victim)
        self.back.append(await until_back(app, victim.pid, self.moments[-1], routers))

    @asynccontextmanager
    async def watched(self, url: str, period: float = 0.2) -> AsyncIterator[None]:
        """Look at the invariants while the block runs; what they say counts as faults and ends no run."""
        invariants = Invariants(url, period, may_miss=math.inf)
        try:
            async with invariants:
                yield
        except AssertionError as broken:
            self.faults.append(str(broken))
        self.samples, self.missed = invariants.samples, invariants.missed

    def common_figures(self) -> dict[str, Any]:
        """Return those of every random run, for a table or a file."""
        return {
            "seed": self.seed,
            "kills": len(self.victims),
            "kills_by_victim": dict(Counter(self.victims)),
            "streams": self.outcomes.total(),
            "streams_by_outcome": dict(self.outcomes),
            "errors_by_code": dict(self.errors),
            "rules_broken": len(self.faults),
            "broken": self.faults[:SHOWN],
            "back_s_worst": max(self.back, default=0.0),
            "invariants_looked_at": self.samples,
            "looks_without_an_answer": len(self.missed),
        }


async def until_back(app: App, gone: int, since: float, routers: int = 0) -> float:
    """Return the seconds from `since` until all replicas serve, none of them with the process `gone`.

    routers: so many of them serve again, too.
    """
    async with client_of(app.url) as client:
        while time.monotonic() - since < BACK:
            try:
                body = (await client.get("/ready", timeout=5)).json()
            except (httpx.HTTPError, ValueError):
                body = {}
            pids = [pid for replica in body.get("replicas", ()) for pid in replica["pids"]]
            whole = body.get("ready") and len(body["replicas"]) == app.replicas and gone not in pids
            if whole and await asyncio.to_thread(_routers_are, routers, gone):
                return time.monotonic() - since
            await asyncio.sleep(0.1)
    return float("inf")


def _routers_are(count: int, gone: int) -> bool:
    """Whether at least `count` routers run, none of them with the process `gone`."""
    there = [one.pid for one in router_processes()]
    return gone not in there and len(there) >= count and routers_running() >= count


def verdict(stream: Stream, undisturbed: Stream) -> str:
    """Return what a client would say of the stream: `same`, `differs`, or how it ended if it was not whole."""
    if stream.kind == WHOLE:
        return SAME if stream.said == undisturbed.said and not stream.faults else DIFFERS
    if stream.tokens != undisturbed.tokens[: len(stream.tokens)]:
        return DIFFERS
    return stream.kind
