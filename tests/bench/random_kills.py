"""Random kills under streams without end: what `python -m tests.bench.kills --kills 200` runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.chaos.invariants import Invariants
from tests.chaos.streams import ERROR, WHOLE, Stream, client_of, greedy_or_seeded, read_all, read_stream
from tests.cluster.harness import App, kill, replica_processes, worker_processes

DISTINCT = 48  # requests to choose from: each is run undisturbed once
BACK = 120.0  # seconds after which a service counts as not recovered
SAME, DIFFERS = "same", "differs"
VICTIMS = {"replica": replica_processes, "worker rank": worker_processes}


@dataclass(slots=True)
class RandomKills:
    """The report. waits: kill -> of each stream under way then, seconds to its next token."""

    seed: int
    victims: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    waits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    back: list[float] = field(default_factory=list)
    samples: int = 0

    @property
    def exact_share(self) -> float:
        """Streams that were whole and as undisturbed, of all: 0 to 1."""
        return self.outcomes[SAME] / max(1, sum(self.outcomes.values()))

    @property
    def promise_kept(self) -> bool:
        """Whether every stream was exact or ended in one typed error, and every replica came back."""
        return not self.faults and set(self.outcomes) <= {SAME, ERROR} and max(self.back, default=0.0) < BACK

    def figures(self) -> dict[str, Any]:
        """Return what goes into a table or a file."""
        longest = [max(waits) for waits in self.waits.values()]
        return {
            "seed": self.seed,
            "kills": len(self.victims),
            "kills_by_victim": dict(Counter(self.victims)),
            "streams": sum(self.outcomes.values()),
            "streams_by_outcome": dict(self.outcomes),
            "errors_by_code": dict(self.errors),
            "exact_share": self.exact_share,
            "rules_broken": len(self.faults),
            "invariants_looked_at": self.samples,
            # Half of the streams run where nothing was killed: the longest wait of each kill is one that moved.
            "next_token_s_median_of_all": _median([wait for waits in self.waits.values() for wait in waits]),
            "next_token_s_median_of_longest": _median(longest),
            "next_token_s_worst": max(longest, default=0.0),
            "back_s_median": _median(self.back),
            "back_s_worst": max(self.back, default=0.0),
        }


class RandomKiller:
    """Keeps `streams` streams going and kills a replica or a worker rank whenever all replicas serve."""

    def __init__(self, app: App, kills: int, streams: int, tokens: int, seed: int) -> None:
        self.report = RandomKills(seed)
        self._app = app
        self._kills = kills
        self._streams = streams
        self._tokens = tokens
        self._rng = Random(seed)
        self._moments: list[float] = []
        self._over = False

    async def run(self) -> RandomKills:
        """Kill as often as was asked for and return what the clients saw."""
        asked = [greedy_or_seeded(index, self._tokens) for index in range(DISTINCT)]
        async with client_of(self._app.url) as client, Invariants(self._app.url, period=1.0) as invariants:
            oracle = await read_all(client, asked)
            rngs = [Random(self._rng.random()) for _ in range(self._streams)]
            readers = [asyncio.create_task(self._read(client, oracle, rng)) for rng in rngs]
            for number in range(1, self._kills + 1):
                await self._kill_one()
                print(
                    f"kill {number}: {self.report.victims[-1]}, back after {self.report.back[-1]:.1f} s", flush=True
                )
            self._over = True
            await asyncio.gather(*readers)
            self.report.samples = invariants.samples
        return self.report

    async def _read(self, client: httpx.AsyncClient, oracle: Sequence[Stream], rng: Random) -> None:
        while not self._over:
            undisturbed = rng.choice(oracle)
            stream = await read_stream(client, undisturbed.asked)
            outcome = verdict(stream, undisturbed)
            self.report.outcomes[outcome] += 1
            self.report.faults += stream.faults
            for number, moment in enumerate(self._moments):
                if (wait := stream.longest_wait(moment)) is not None:
                    self.report.waits[number].append(wait)
            if stream.error is not None:
                self.report.errors[stream.error["code"]] += 1
                await asyncio.sleep(1.0)  # as a client that honours Retry-After

    async def _kill_one(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        name = self._rng.choice(sorted(VICTIMS))
        victim = self._rng.choice(VICTIMS[name]())
        self._moments.append(time.monotonic())
        kill(victim)
        self.report.victims.append(name)
        self.report.back.append(await until_back(self._app, victim.pid, self._moments[-1]))


async def until_back(app: App, gone: int, since: float) -> float:
    """Return the seconds from `since` until all replicas serve, none of them with the process `gone`."""
    async with client_of(app.url) as client:
        while time.monotonic() - since < BACK:
            try:
                body = (await client.get("/ready", timeout=5)).json()
            except (httpx.HTTPError, ValueError):
                body = {}
            pids = [pid for replica in body.get("replicas", ()) for pid in replica["pids"]]
            if body.get("ready") and len(body["replicas"]) == app.replicas and gone not in pids:
                return time.monotonic() - since
            await asyncio.sleep(0.1)
    return float("inf")


def verdict(stream: Stream, undisturbed: Stream) -> str:
    """Return what a client would say of the stream: `same`, `differs`, or how it ended if it was not whole."""
    if stream.kind == WHOLE:
        return SAME if stream.said == undisturbed.said and not stream.faults else DIFFERS
    if stream.tokens != undisturbed.tokens[: len(stream.tokens)]:
        return DIFFERS
    return stream.kind


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
