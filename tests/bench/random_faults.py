"""One random fault at a time: a process is killed or stopped for seconds, or a router is cut off from replicas."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from random import Random

from tests.bench.siege import RANK, REPLICA, VICTIMS, Siege, until_back
from tests.bench.switchboard import Switchboard
from tests.e2e.harness import App, router_processes

KILL, STALL, CUT = "kill", "stall", "cut"
KINDS = (KILL, STALL, CUT)
SHORTEST, LONGEST = 2.0, 10.0  # seconds
# What stands before a router takes it for dead after 8 s without a word, and tells its clients.
LONGEST_OF_ROUTER = 6.0


class RandomFaults:
    """Draws faults of some `kinds` and notes them in a report.

    board: what the links go through, for cuts. victims: of kills, names in `VICTIMS`.
    """

    def __init__(
        self,
        app: App,
        report: Siege,
        rng: Random,
        kinds: tuple[str, ...],
        board: Switchboard | None,
        victims: tuple[str, ...] = (RANK, REPLICA),
    ) -> None:
        self._app = app
        self._report = report
        self._rng = rng
        self._kinds = kinds
        self._board = board
        self._victims = victims

    async def strike(self) -> None:
        """Let one thing go wrong and wait until the app is whole again."""
        kind = self._kinds[0] if len(self._kinds) == 1 else self._rng.choice(self._kinds)
        if kind == KILL:
            await self._report.kill_one(self._app, self._rng, self._victims)
        elif kind == STALL:
            await self._stall()
        else:
            await self._cut()

    async def _stall(self) -> None:
        name = self._rng.choice(sorted(VICTIMS))
        victim = self._rng.choice(VICTIMS[name]()).pid
        seconds = self._rng.uniform(SHORTEST, LONGEST_OF_ROUTER if name == "router" else LONGEST)
        self._begin(f"{name}, stopped")
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):  # a rank that hangs is killed with its group
                os.kill(victim, signal.SIGCONT)
        await self._until_back()

    async def _cut(self) -> None:
        assert self._board is not None
        router = self._rng.choice(router_processes()).pid
        if not self._board.num_doors(router):
            raise RuntimeError(f"the links of router {router} do not go through the switchboard")
        self._begin("router, cut off")
        self._board.cut(router)
        try:
            await asyncio.sleep(self._rng.uniform(SHORTEST, LONGEST))
        finally:
            self._board.heal(router)
        await self._until_back()

    def _begin(self, victim: str) -> None:
        self._report.victims.append(victim)
        self._report.moments.append(time.monotonic())

    async def _until_back(self) -> None:
        """Wait until all replicas serve, whoever they are: from the end of the fault on."""
        self._report.back.append(await until_back(self._app, -1, time.monotonic()))
