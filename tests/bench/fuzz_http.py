"""Random whole requests beside bystanders: none may slow them by more than twice, change them, or find a 5xx.

    python -m tests.bench.fuzz_http [--minutes 60] [--seed 1] [--bystanders 31]
    python -m tests.bench.fuzz_http --seed 1 --only 17,230                           these requests of that seed again

The demo model on a real Serve app. The bystanders stream without end, each the same prompt again and again; every
stream must have the tokens of an undisturbed run and find its prompt cached. One stranger at a time sends what
`wild_requests` makes. Where the bystanders' tokens per second fall below half of what they are beside an ordinary
request, both are sent again in turn: it counts as slow if it is so each time. No process may be replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tests.bench.kills import figures_table, served_demo
from tests.bench.machine import provenance
from tests.bench.siege import SAME, Siege
from tests.bench.wild_requests import WildRequest, ordinary_request, wild_request
from tests.chaos.streams import Stream, client_of, greedy_or_seeded, read_all, read_stream
from tests.e2e.harness import App

PATIENCE = 30.0  # seconds that a stranger reads; a whole context of 2,048 tokens takes about as long
LEAST = 1.0  # seconds over which a pace is taken: fewer hold a handful of steps
SLOW = 0.5  # of the pace beside an ordinary request
TRIES = 3


@dataclass(slots=True)
class FuzzReport(Siege):
    """What happened. answers: statuses of the strangers, `left` those that hung up. wrong: what must not be."""

    answers: Counter[str] = field(default_factory=Counter)
    paces: list[float] = field(default_factory=list)
    doubted: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What must not be."""
        found = self.wrong + self.faults
        if extra := set(self.outcomes) - {SAME}:
            found.append(f"bystanders' streams that were {sorted(extra)}: {dict(self.errors)}")
        return found

    def figures(self) -> dict[str, Any]:
        """Return what goes into a table or a file."""
        common = self.common_figures()
        kept = ("seed", "streams", "streams_by_outcome", "errors_by_code", "rules_broken", "invariants_looked_at")
        return {name: common[name] for name in kept} | {
            "requests": self.answers.total(),
            "answers": dict(self.answers.most_common()),
            "worst_pace": min(self.paces, default=1.0),
            "doubted": self.doubted,
            "problems": self.problems,
        }


class Fuzz:
    """One run on an app that is there already and stays whole."""

    def __init__(self, app: App, seconds: float, seed: int = 1, bystanders: int = 31, tokens: int = 160) -> None:
        self.report = FuzzReport(seed)
        self._app = app
        self._seconds = seconds
        self._seed = seed
        self._asked = [greedy_or_seeded(index, tokens) for index in range(bystanders)]
        self._heard = 0
        self._missed = 0
        self._over = False

    async def run(self, only: Iterable[int] | None = None) -> FuzzReport:
        """Send requests for the time that was asked for, or those of `only`; all must be settled afterwards."""
        processes = self._processes()
        async with self.report.watched(self._app.url), client_of(self._app.url) as client:
            # Twice: what the second run finds cached is what each replica should find from then on.
            await read_all(client, self._asked)
            oracle = await read_all(client, self._asked)
            streams = [asyncio.create_task(self._listen(client, one)) for one in oracle]
            try:
                await self._send_all(client, count() if only is None else only)
            finally:
                self._over = True
                await asyncio.gather(*streams)
        # What a replica has not seen yet it cannot have cached.
        if self._missed > len(self._asked) * self._app.replicas:
            self.report.wrong.append(f"{self._missed} streams found less of their prompt cached than before")
        if self._processes() != processes:
            self.report.wrong.append(f"processes were replaced: {processes} before, {self._processes()} now")
        return self.report

    async def _send_all(self, client: httpx.AsyncClient, numbers: Iterable[int]) -> None:
        until = time.monotonic() + self._seconds
        usual = await self._pace(client, ordinary_request())
        for number in numbers:
            if time.monotonic() > until:
                return
            stranger = wild_request(f"{self._seed}-{number}")
            pace = await self._pace(client, stranger, number)
            if pace < SLOW * usual:
                self.report.doubted += 1
                pace, usual = await self._again(client, stranger, pace, usual, number)
            self.report.paces.append(pace / usual)

    async def _again(
        self, client: httpx.AsyncClient, stranger: WildRequest, pace: float, usual: float, number: int
    ) -> tuple[float, float]:
        """Take both paces in turn until one of the stranger's is well, or it never was. Return the last two."""
        for _ in range(TRIES - 1):
            usual = await self._pace(client, ordinary_request())
            pace = await self._pace(client, stranger, number)
            if pace >= SLOW * usual:
                return pace, usual
        self.report.wrong.append(f"request {number} slows its neighbours to {pace / usual:.2f}: {stranger}")
        return pace, usual

    async def _pace(self, client: httpx.AsyncClient, stranger: WildRequest, number: int | None = None) -> float:
        """Return the bystanders' tokens per second while a stranger is there."""
        began, heard = time.monotonic(), self._heard
        outcome = await self._send(client, stranger)
        if number is not None:
            self.report.answers[outcome] += 1
            if outcome[0] not in "24l":
                self.report.wrong.append(f"request {number} was answered {outcome}: {stranger}")
        await asyncio.sleep(LEAST - (time.monotonic() - began))
        return (self._heard - heard) / (time.monotonic() - began)

    async def _send(self, client: httpx.AsyncClient, stranger: WildRequest) -> str:
        """Return the status, with the code of an error in the stream; `left` where the client hung up."""
        patience = PATIENCE if stranger.leaves is None else stranger.leaves
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                try:
                    return await self._read(client, stranger)
                except httpx.TransportError as error:
                    return f"cut ({type(error).__name__})"
        return "left"

    async def _read(self, client: httpx.AsyncClient, stranger: WildRequest) -> str:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in stranger.headers.items()]
        sent = client.stream("POST", stranger.route, content=stranger.body, headers=headers, timeout=PATIENCE)
        async with sent as response:
            status = str(response.status_code)
            async for line in response.aiter_lines():
                if line.startswith("data: {") and (error := json.loads(line[6:]).get("error")):
                    # What is the client's fault is a 4xx that came late.
                    late = "400" if error["type"] == "invalid_request_error" else "500"
                    status = f"{late} in the stream: {error['code']}"
            return status

    async def _listen(self, client: httpx.AsyncClient, undisturbed: Stream) -> None:
        def heard(stream: Stream) -> None:
            self._heard += len(stream.tokens) - told.get(id(stream), 0)
            told[id(stream)] = len(stream.tokens)

        expected = _cached(undisturbed)
        while not self._over:
            told: dict[int, int] = {}
            stream = await read_stream(client, undisturbed.asked, heard)
            self.report.count(stream, undisturbed)
            self._missed += _cached(stream) < expected
            if stream.error is not None:
                await asyncio.sleep(1.0)  # as a client that honours Retry-After

    def _processes(self) -> set[int]:
        return {pid for replica in self._app.ready()["replicas"] for pid in replica["pids"]}


def _cached(stream: Stream) -> int:
    details: Any = (stream.usage or {}).get("prompt_tokens_details")
    return int(details["cached_tokens"]) if details else 0


def main() -> None:
    """Run, print, and fail where something must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bystanders", type=int, default=31)
    parser.add_argument("--only", type=lambda text: [int(one) for one in text.split(",")], help="numbers of requests")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with served_demo() as app:
        fuzz = Fuzz(app, 60 * options.minutes, options.seed, options.bystanders)
        report = asyncio.run(fuzz.run(options.only))
    Console().print(figures_table(report.figures(), "fuzz of whole requests"))
    if options.output:
        options.output.write_text(json.dumps(provenance() | report.figures(), indent=2) + "\n")
    sys.exit("\n".join(report.problems) or None)


if __name__ == "__main__":
    main()
