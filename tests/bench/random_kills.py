"""Random faults under streams without end: what `python -m tests.bench.kills --kills 200` runs, kills if not told."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.bench.random_faults import KILL, RandomFaults
from tests.bench.siege import BACK, RANK, REPLICA, SAME, Siege
from tests.bench.switchboard import Switchboard
from tests.chaos.streams import ERROR, Stream, client_of, greedy_or_seeded, read_all, read_stream
from tests.e2e.harness import App

DISTINCT = 48  # requests to choose from: each is run undisturbed once


@dataclass(slots=True)
class RandomKills(Siege):
    """The report. waits: fault -> of each stream under way then, seconds to its next token."""

    waits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def exact_share(self) -> float:
        """Streams that were whole and as undisturbed, of all: 0 to 1."""
        return self.outcomes[SAME] / max(1, self.outcomes.total())

    @property
    def promise_kept(self) -> bool:
        """Whether every stream was exact or ended in one typed error, and every replica came back."""
        return not self.faults and set(self.outcomes) <= {SAME, ERROR} and max(self.back, default=0.0) < BACK

    def figures(self) -> dict[str, Any]:
        """Return what goes into a table or a file."""
        longest = [max(waits) for waits in self.waits.values()]
        return self.common_figures() | {
            "exact_share": self.exact_share,
            # Half of the streams run where nothing was killed: the longest wait of each kill is one that moved.
            "next_token_s_median_of_all": _median([wait for waits in self.waits.values() for wait in waits]),
            "next_token_s_median_of_longest": _median(longest),
            "next_token_s_worst": max(longest, default=0.0),
            "next_token_s_worst_by_victim": self._worst_by_victim(),
            "back_s_median": _median(self.back),
        }

    def _worst_by_victim(self) -> dict[str, float]:
        worst: dict[str, float] = defaultdict(float)
        for number, waits in self.waits.items():
            victim = self.victims[number]
            worst[victim] = max(worst[victim], *(round(wait, 2) for wait in waits))
        return dict(worst)


class RandomKiller:
    """Keeps `streams` streams going and strikes whenever all replicas serve: a process is killed, unless told else.

    faults, victims: the kinds to draw from (`tests.bench.random_faults`). board: what the links go through, for cuts.
    """

    def __init__(
        self,
        app: App,
        kills: int,
        streams: int,
        tokens: int,
        seed: int,
        faults: tuple[str, ...] = (KILL,),
        board: Switchboard | None = None,
        victims: tuple[str, ...] = (RANK, REPLICA),
    ) -> None:
        self.report = RandomKills(seed)
        self._app = app
        self._kills = kills
        self._streams = streams
        self._tokens = tokens
        self._rng = Random(seed)
        self._faults = RandomFaults(app, self.report, self._rng, faults, board, victims)
        self._over = False

    async def run(self, seconds: float = math.inf) -> RandomKills:
        """Strike as often as was asked for, or for so long, and return what the clients saw."""
        until = time.monotonic() + seconds
        asked = [greedy_or_seeded(index, self._tokens) for index in range(DISTINCT)]
        # Before it is counted what is open: gateways keep as many connections to routers as were needed at one time.
        async with client_of(self._app.url) as client:
            oracle = await read_all(client, asked)
        # The client's own connections are closed before it is looked at what is left.
        async with self.report.watched(self._app.url, period=1.0), client_of(self._app.url) as client:
            rngs = [Random(self._rng.random()) for _ in range(self._streams)]
            readers = [asyncio.create_task(self._read(client, oracle, rng)) for rng in rngs]
            for number in range(1, self._kills + 1):
                if time.monotonic() > until:
                    break
                await asyncio.sleep(self._rng.uniform(0.2, 2.0))
                await self._faults.strike()
                print(f"{number}: {self._last()}", flush=True)
            self._over = True
            await asyncio.gather(*readers)
        return self.report

    def _last(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in self.report.outcomes.items())
        return f"{self.report.victims[-1]}, back after {self.report.back[-1]:.1f} s; streams so far: {ends}"

    async def _read(self, client: httpx.AsyncClient, oracle: Sequence[Stream], rng: Random) -> None:
        while not self._over:
            undisturbed = rng.choice(oracle)
            stream = await read_stream(client, undisturbed.asked)
            self.report.count(stream, undisturbed)
            for number, moment in enumerate(self.report.moments):
                if (wait := stream.longest_wait(moment)) is not None:
                    self.report.waits[number].append(wait)
            if stream.error is not None:
                await asyncio.sleep(1.0)  # as a client that honours Retry-After


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
