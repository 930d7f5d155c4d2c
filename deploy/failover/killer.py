"""Watches the replicas, and kills one of them every few seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from random import Random

import httpx

from deploy.failover.board import Board, Kill, ReplicaSeen
from deploy.status import ReplicaLine, StatusReport, detail, read_report

LOOK_SECONDS = 0.2


class Killer:
    """Kills a replica each time that all `replicas` serve and `every` seconds have passed since the last kill.

    kill: ends a process; for tests.
    """

    def __init__(
        self,
        board: Board,
        client: httpx.AsyncClient,
        replicas: int,
        every: float,
        rng: Random,
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        self._board = board
        self._client = client
        self._wanted = replicas
        self._every = every
        self._rng = rng
        self._kill = kill
        self._next = board.began + every
        self._moved_before: int | None = None
        self._pids: dict[str, tuple[int, ...]] = {}

    async def run(self, enough: Callable[[Board], bool]) -> None:
        """Poll and kill until there were `enough` kills and all replicas serve again."""
        while True:
            await self._poll()
            now = time.monotonic()
            if self._is_whole():
                self._recovered(now)
                if enough(self._board):
                    return
                if now >= self._next and any(stream.tokens for stream in self._board.streams):
                    self._strike(now)
            await asyncio.sleep(LOOK_SECONDS)

    def _is_whole(self) -> bool:
        return sum(replica.state == "ready" for replica in self._board.replicas) >= self._wanted

    def _recovered(self, now: float) -> None:
        kills = self._board.kills
        if kills and kills[-1].back is None:
            kills[-1].back = now - kills[-1].at
            self._next = now + self._every
            self._note(now, f"all {self._wanted} replicas serve again, {kills[-1].back:.1f} s after the kill")

    def _strike(self, now: float) -> None:
        ready = [replica for replica in self._board.replicas if replica.state == "ready" and replica.pids]
        if not ready:
            return
        victim = self._rng.choice(ready)
        pid = victim.pids[0]
        self._board.kills.append(Kill(pid, victim.name, now))
        self._note(now, f"kill -9 {pid}: replica {victim.name}, with {victim.running} sequences")
        self._board.replicas = [replica for replica in self._board.replicas if replica is not victim]
        self._kill(pid)

    def _note(self, now: float, text: str) -> None:
        self._board.events.append(f"{now - self._board.began:6.1f} s  {text}")

    async def _poll(self) -> None:
        try:
            ready, metrics = await asyncio.gather(self._client.get("/ready"), self._client.get("/metrics"))
            body = ready.json()
        except (httpx.HTTPError, ValueError):
            return  # no answer just now: the picture stays as it was
        for replica in body.get("replicas", []):
            self._pids[replica["id"]] = tuple(replica["pids"])
        self._take(read_report(str(self._client.base_url), body, metrics.text))

    def _take(self, report: StatusReport) -> None:
        dead = {kill.name for kill in self._board.kills}
        self._board.replicas = [self._seen(line) for line in report.replicas if line.name not in dead]
        moved = report.migrations or 0
        if self._moved_before is None:
            self._moved_before = moved
        self._board.migrations = moved - self._moved_before

    def _seen(self, line: ReplicaLine) -> ReplicaSeen:
        pids = self._pids.get(line.name, ())
        return ReplicaSeen(line.name, line.state, pids, line.running or 0, line.kv_usage or 0.0, detail(line))
