"""A long seeded random run: streams, aborts and kills for minutes, with every invariant on and memory watched.

    python -m tests.bench.soak [--minutes 10] [--streams 16] [--seed 1] [--kill-every 30]        (make soak)

A fifth of the requests is given up by its client at a random token, the first one included; the others must be whole
and as in an undisturbed run, or end in one typed error. A replica or a worker rank is killed now and then, in the
first half of the time: in the second half replicas live long enough to be weighed. Memory is flat when a straight
line through the resident set of a process does not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console

from tests.bench.kills import figures_table, served_demo
from tests.bench.machine import provenance
from tests.bench.siege import BACK, SAME, Siege
from tests.chaos.streams import ERROR, Stream, client_of, greedy_or_seeded, read_all, read_stream
from tests.e2e.harness import APP, App, processes

DISTINCT = 32
ABORTED = "aborted"
ABORT_SHARE = 0.2
MB = 2**20
WARM_UP = 60.0  # seconds of a process's life that say nothing of its slope
KILLING_SHARE = 0.5  # of the time, from the beginning
FLAT = 2.0  # MB per minute that count as flat: 1 GB would be gained in eight hours


class GivenUpError(Exception):
    """The client wants no more of the stream."""


@dataclass(slots=True)
class SoakReport(Siege):
    """What happened. memory: process -> [seconds since the start, resident MB]."""

    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def slopes(self) -> dict[str, float]:
        """MB per minute of each process that lived long enough to have one."""
        return {name: slope for name, series in self.memory.items() if (slope := slope_of(series)) is not None}

    @property
    def problems(self) -> list[str]:
        """What must not be."""
        found = list(self.faults)
        if extra := set(self.outcomes) - {SAME, ERROR, ABORTED}:
            found.append(f"streams that were {extra}")
        if any(back >= BACK for back in self.back):
            found.append("a replica did not come back")
        found += [f"{name} gains {slope:.1f} MB a minute" for name, slope in self.slopes.items() if slope > FLAT]
        return found

    def figures(self) -> dict[str, Any]:
        """Return what goes into a table or a file."""
        return self.common_figures() | {
            "memory_mb_per_minute": {name: round(slope, 2) for name, slope in self.slopes.items()},
            "memory_mb": {name: round(series[-1][1]) for name, series in self.memory.items()},
            "problems": self.problems,
        }


def slope_of(series: Sequence[tuple[float, float]], warm_up: float = WARM_UP) -> float | None:
    """Return the slope per minute of a straight line through the points after `warm_up`; None for a short life."""
    settled = [(at, value) for at, value in series if at >= series[0][0] + warm_up]
    if len(settled) < 10 or settled[-1][0] - settled[0][0] < 2 * warm_up:
        return None
    at, values = np.array(settled).T
    return float(np.polyfit(at / 60.0, values, 1)[0])


class Soak:
    """One run on an app that is there already and stays whole."""

    def __init__(
        self, app: App, seconds: float, streams: int = 16, tokens: int = 160, seed: int = 1, kill_every: float = 30.0
    ) -> None:
        self.report = SoakReport(seed)
        self._app = app
        self._seconds = seconds
        self._streams = streams
        self._tokens = tokens
        self._kill_every = kill_every
        self._rng = Random(seed)
        self._over = False

    async def run(self) -> SoakReport:
        """Run for the time that was asked for; everything must be settled afterwards."""
        async with self.report.watched(self._app.url), client_of(self._app.url) as client:
            oracle = await read_all(client, [greedy_or_seeded(i, self._tokens) for i in range(DISTINCT)])
            self._began = time.monotonic()
            rngs = [Random(self._rng.random()) for _ in range(self._streams)]
            helpers = [asyncio.create_task(self._weigh()), asyncio.create_task(self._kill())]
            readers = [asyncio.create_task(self._read(client, oracle, rng)) for rng in rngs]
            await asyncio.sleep(self._seconds)
            self._over = True
            await asyncio.gather(*readers, *helpers)
        return self.report

    async def _read(self, client: httpx.AsyncClient, oracle: Sequence[Stream], rng: Random) -> None:
        while not self._over:
            undisturbed = rng.choice(oracle)
            patience = rng.randrange(self._tokens) if rng.random() < ABORT_SHARE else None
            stream = await self._one(client, undisturbed.asked, patience)
            if stream is None:
                self.report.outcomes[ABORTED] += 1
                continue
            self.report.count(stream, undisturbed)
            if stream.error is not None:
                await asyncio.sleep(1.0)  # as a client that honours Retry-After

    async def _one(self, client: httpx.AsyncClient, asked: dict[str, Any], patience: int | None) -> Stream | None:
        """Return the stream, or None if it was given up after `patience` tokens; with 0 it waits for none."""

        def heard(stream: Stream) -> None:
            if patience is not None and len(stream.tokens) >= patience:
                raise GivenUpError

        try:
            if patience == 0:
                async with asyncio.timeout(0.02):
                    return await read_stream(client, asked)
            return await read_stream(client, asked, heard)
        except (GivenUpError, TimeoutError):
            return None

    async def _kill(self) -> None:
        while True:
            due = time.monotonic() + self._kill_every * self._rng.uniform(0.5, 1.5)
            while time.monotonic() < due:
                if time.monotonic() - self._began > KILLING_SHARE * self._seconds:
                    return
                await asyncio.sleep(0.1)
            await self.report.kill_one(self._app, self._rng)

    async def _weigh(self) -> None:
        while not self._over:
            for process in processes(f"ray::ServeReplica:{APP}:") + processes("ray::WorkerActor"):
                with suppress(psutil.NoSuchProcess):
                    # Ray's titles end with the method that runs just now.
                    title = process.cmdline()[0].split(":")[-1].split(".")[0]
                    entry = (time.monotonic() - self._began, process.memory_info().rss / MB)
                    self.report.memory[f"{title} {process.pid}"].append(entry)
            await asyncio.sleep(1.0)


def main() -> None:
    """Run, print, and fail where something must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds between kills, give or take half")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with served_demo() as app:
        soak = Soak(
            app, 60 * options.minutes, options.streams, options.tokens, options.seed, kill_every=options.kill_every
        )
        report = asyncio.run(soak.run())
    Console().print(figures_table(report.figures(), "soak"))
    if options.output:
        options.output.write_text(json.dumps(provenance() | report.figures(), indent=2) + "\n")
    unweighed = [] if report.slopes else ["no process lived long enough to be weighed: ask for more --minutes"]
    sys.exit("\n".join(report.problems + unweighed) or None)


if __name__ == "__main__":
    main()
