"""What must hold all the time, looked at while things are killed, and what must be left when it is quiet again."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.chaos.streams import client_of

QUIET = 5.0  # seconds after which nothing may be left of what was lost (FAULTS)
SAMPLE = re.compile(r"^(\w+?)(?:\{(.*)\})? (\S+)$")
WATCHED = (  # without them the sums would hold of nothing
    "squadron_requests_accepted_total",
    "squadron_requests_ended_total",
    "squadron_requests_live",
    "squadron_misplaced_rows_total",
    "squadron_kv_blocks",
    "squadron_num_requests_running",
    "squadron_num_requests_waiting",
)
LABEL = re.compile(r'(\w+)="([^"]*)"')
SHM = Path("/dev/shm")


def scrape(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return name -> labels -> value of a Prometheus text, for the names that are ours."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and match[1].startswith("squadron_"):
            found[match[1]][tuple(sorted(LABEL.findall(match[2] or "")))] = float(match[3])
    return found


class Invariants:
    """Watches an app through its own /metrics and /ready while a scenario runs, and its processes around it.

    `async with Invariants(url):` samples until the block ends; then everything that a lost group or a request could
    leave behind must be gone within `QUIET` seconds. A violation is an `AssertionError` with the sample.

    may_miss: how many looks the router may leave without an answer; none, unless a router or a proxy is what dies.
    """

    def __init__(
        self,
        url: str,
        period: float = 0.2,
        quiet: float = QUIET,
        root: psutil.Process | None = None,
        may_miss: float = 0,
    ) -> None:
        self.samples = 0
        self.missed: list[str] = []  # looks that brought no figures, and why
        self.violations: list[str] = []
        self._url = url
        self._period = period
        self._quiet = quiet
        self._may_miss = may_miss
        self._root = root or psutil.Process()
        self._task: asyncio.Task[None] | None = None
        self._never_seen = set(WATCHED)
        self._ranks: set[int] = set()  # processes of the replicas that /ready named last
        self._ever: dict[int, float] = {}  # and of all that it ever named, with the times at which they were created

    async def __aenter__(self) -> Invariants:
        self._segments = segments()
        self._descriptors = descriptors(self._root)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if error is None:
            assert not self.violations, self.violations
            assert self.samples, "nobody was there to be watched"
            assert len(self.missed) <= self._may_miss, self.missed
            await self.settle()
            assert not self.violations, self.violations
            assert not self._never_seen, f"/metrics said nothing of {sorted(self._never_seen)}"

    async def settle(self) -> None:
        """Wait until nothing is left over; fail with what is after `quiet` seconds."""
        deadline = time.monotonic() + self._quiet
        while left := await self._left_over():
            assert time.monotonic() < deadline, f"left over after {self._quiet:g} s of quiet: {left}"
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        async with client_of(self._url) as client:
            while True:
                try:
                    await self._look(client)
                except (httpx.HTTPError, ValueError) as error:
                    self.missed.append(repr(error))
                await asyncio.sleep(self._period)

    async def _look(self, client: httpx.AsyncClient) -> None:
        metrics = await client.get("/metrics", timeout=5)
        ready = await client.get("/ready", timeout=5)
        if metrics.status_code != 200:
            self.missed.append(f"/metrics answers {metrics.status_code}")
            return
        self.samples += 1
        figures = scrape(metrics.text)
        self._never_seen -= set(figures)
        self.violations += broken_sums(figures)
        body: dict[str, Any] = ready.json()
        self._ranks = {pid for replica in body.get("replicas", ()) for pid in replica["pids"]}
        self._remember(self._ranks - self._ever.keys())
        if body.get("ready") is not (ready.status_code == 200):
            self.violations.append(f"/ready answers {ready.status_code} with {body}")
        if body.get("ready") and not body["replicas"]:
            self.violations.append("ready without a replica")

    def _remember(self, pids: set[int]) -> None:
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                self._ever[pid] = psutil.Process(pid).create_time()

    async def _left_over(self) -> list[str]:
        left = [f"shared memory {name}" for name in segments() - self._segments]
        left += grown(self._descriptors, descriptors(self._root))
        async with client_of(self._url) as client:
            try:
                await self._look(client)
                answer = await client.get("/metrics", timeout=5)
                left += (
                    unsettled(scrape(answer.text)) if answer.status_code == 200 else [f"status {answer.status_code}"]
                )
            except httpx.HTTPError as error:
                left.append(f"no metrics: {error!r}")
        return left + alive(pid for pid in self._ever if pid not in self._ranks and self._is_same(pid))

    def _is_same(self, pid: int) -> bool:
        """Whether the process still is the one that was named: numbers are given again."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).create_time() == self._ever[pid]
        return False


def broken_sums(metrics: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> list[str]:
    """Return what does not add up in one scrape of one router."""
    broken = []
    accepted = sum(metrics["squadron_requests_accepted_total"].values())
    ended = sum(metrics["squadron_requests_ended_total"].values())
    live = sum(metrics["squadron_requests_live"].values())
    if accepted != ended + live:
        broken.append(f"{accepted:g} requests were accepted, {ended:g} ended and {live:g} live")
    if sum(metrics["squadron_misplaced_rows_total"].values()):
        broken.append("a replica told a token at the wrong place")
    broken += [f"{value:g} blocks: {labels}" for labels, value in metrics["squadron_kv_blocks"].items() if value < 0]
    return broken


def unsettled(metrics: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> list[str]:
    """Return what an idle service should not show: requests that live, blocks that are held."""
    left = [
        f"{name}: {value:g}"
        for name in ("requests_live", "num_requests_running", "num_requests_waiting")
        for value in metrics[f"squadron_{name}"].values()
        if value
    ]
    for labels, blocks in metrics["squadron_kv_blocks"].items():
        if ("state", "held") in labels and blocks:
            left.append(f"{blocks:g} blocks are held: {labels}")
    return left


def segments() -> set[str]:
    """Return the names of our shared-memory segments that exist."""
    return {path.name for path in SHM.glob("squadron-*")} if SHM.is_dir() else set()


def alive(pids: Iterable[int]) -> list[str]:
    """Return those of `pids` that exist, stopped and zombies included, in words."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append(f"process {pid} ({process.status()}): {' '.join(process.cmdline())}")
    return found


def descriptors(root: psutil.Process) -> dict[int, int]:
    """Return pid -> open descriptors of the routers and replicas that `root` started."""
    counts: dict[int, int] = {}
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            if "ray::ServeReplica" in " ".join(process.cmdline()):
                counts[process.pid] = process.num_fds()
    return counts


def grown(before: dict[int, int], after: dict[int, int], slack: int = 8) -> Iterable[str]:
    """Return the processes that hold on to descriptors. slack: a replica that was replaced may be linked to anew."""
    return [
        f"process {pid} has {after[pid]} descriptors, {before[pid]} before"
        for pid in before
        if pid in after and after[pid] > before[pid] + slack
    ]
