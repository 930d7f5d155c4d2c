"""Runs a history in virtual time: clients ask, faults strike, and after every event what must hold is checked."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from starlette.types import ASGIApp

from cluster.ingress import router_link
from cluster.ingress.guard import RouterLossGuard
from cluster.openai.served_model import ServedModel
from cluster.simulator import checks
from cluster.simulator.answers import GONE, WHOLE, Answer, Scene
from cluster.simulator.clients import HttpClient, KeptClient, ServeProxy, ask_dispatcher
from cluster.simulator.fleet import NOTICE, Fleet
from cluster.simulator.history import (
    Arrive,
    Blind,
    Cut,
    Delete,
    Drain,
    EngineDies,
    Event,
    History,
    Kill,
    Leap,
    LetGo,
    Partition,
    SetClock,
    Sleep,
    Slow,
    Stop,
)
from cluster.simulator.lives import CONFIG, RouterLife
from cluster.simulator.process import PROCESS, SimulatedLoop, SimulatedProcess, StuckError

PIECE = 64  # bytes of a body in one frame, so that all answers are cut as the largest are
LINKED = 0.2  # seconds in which the first links are made, before the first event
PATIENCE = 400.0  # seconds after the last event in which every answer must have ended
SETTLED = 15.0  # seconds after the last answer in which nothing may be left: above `ReplicaTimes.router_timeout`


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a history. ends: of its answers. trace: a digest of all that clients got, with times."""

    streams: int
    whole: int
    ends: tuple[str, ...]
    violations: tuple[str, ...]
    seconds: float
    turns: int
    trace: str


class World(Scene):
    """One history on one event loop."""

    def __init__(self, history: History, loop: SimulatedLoop, record: str | None, model: ServedModel | None) -> None:
        super().__init__(history, Fleet(history, loop, record, model), [], [])
        self.loop = loop
        self.holder: SimulatedProcess
        self.proxy: ServeProxy
        self.front: ASGIApp

    async def run(self) -> None:
        """Let it happen."""
        self.fleet.begin()
        self._start_holder()
        await asyncio.sleep(LINKED)
        began = self.loop.now
        for event in self.history.events:
            await asyncio.sleep(max(0.0, began + event.at - self.loop.now))
            self._apply(event)
            checks.after_event(self)
        await self._all_end()
        await self._settle()
        await self._look_for_deleted()
        checks.at_end(self)

    async def _look_for_deleted(self) -> None:
        """Note what was deleted and is there again once all ways are open."""
        if any(answer.deleted for answer in self.answers):
            await asyncio.sleep(max(0.0, self.fleet.network.open_from - self.loop.now) + checks.RECOVERY)
        if self.history.scales_to_zero:
            return  # where there is no replica, routers hear of it from the next one
        for answer in self.answers:
            if answer.deleted and await self.holder.spawn(KeptClient(self, answer).is_there(self.front)):
                self.violations.append(f"{answer.name} was deleted, and is there again")

    def _delete(self, event: Delete) -> None:
        if event.answer < len(self.answers) and (answer := self.answers[event.answer]).kept_as:
            self.holder.spawn(KeptClient(self, answer).delete(self.front))

    async def _all_end(self) -> None:
        until = self.loop.now + PATIENCE
        while self.loop.now < until:
            open_ones = [answer.task for answer in self.answers if not answer.ends and answer.task is not None]
            if not open_ones:
                return
            await asyncio.wait(open_ones, timeout=2.0, return_when=asyncio.FIRST_COMPLETED)
            checks.after_event(self)
        late = [answer.name for answer in self.answers if not answer.ends]
        if late:
            self.violations.append(f"{late} have no end after {PATIENCE:g} s")

    async def _settle(self) -> None:
        kept = any(answer.asked.kept for answer in self.answers)  # whose client need not be there
        opens = self.fleet.network.open_from  # until then who is cut off cannot hear that nobody waits
        scales = self.fleet.autoscaler is not None  # after the router is silent for good that had asked
        until = max(self.loop.now, opens) + SETTLED * (1 + scales) + (CONFIG.router_wait if kept else 0.0)
        await asyncio.sleep(0.05)
        while self.loop.now < until and (checks.left_over(self) or self._stands_still()):
            await asyncio.sleep(0.5)
        self.violations += checks.left_over(self)

    def _stands_still(self) -> bool:
        """Whether a router, or one with a successor, may yet charge for what it did before it was stopped."""
        lives = (life.process for life in self.fleet.all_routers)
        return self.history.ingress and any(process.stopped and not process.dead for process in lives)

    def _start_holder(self) -> None:
        self.holder = self.fleet.new_process("holder")
        self.proxy = ServeProxy(self.fleet)
        if self.history.gateway:
            self.front = self.fleet.new_gateway(self.holder)
        else:
            self.front = self.holder.call(RouterLossGuard, self.proxy, self.loop.time)

    def _apply(self, event: Event) -> None:
        match event:
            case Arrive():
                self._arrive(event)
            case Kill():
                self._kill(event)
            case EngineDies() | Drain():
                self._end_replica(event)
            case LetGo(process=slot):
                if slot in self.fleet.routers:
                    self.fleet.let_go(self.fleet.routers[slot], event.protocol)
            case Stop(process=slot):
                self._stop(self.fleet.process(slot), event)
            case Leap(process=slot) | SetClock(process=slot):
                self._leap(self.fleet.process(slot), event)
            case Delete():
                self._delete(event)
            case Sleep():
                self.fleet.sleep(event)
            case Blind():
                self.fleet.blind(event.seconds)
            case _:
                self._disturb(event)

    def _end_replica(self, event: EngineDies | Drain) -> None:
        life = self.fleet.replicas.get(event.process)
        if life is None:  # the autoscaler wants none there
            return
        if isinstance(event, EngineDies):
            self.fleet.engine_dies(life, event.back)
        else:
            version = 1 if self.history.real_engine else event.version
            self.fleet.drain(life, event.back, version, event.protocol)

    def _disturb(self, event: Cut | Partition | Slow) -> None:
        """Do something to the way between a router and a replica."""
        fleet, ends, seconds = self.fleet, (event.router, event.replica), 0.0
        if event.replica == "holder":
            fleet.router_losses += 1  # for its clients, if it takes long
            for life in fleet.all_routers:
                life.apart |= life.slot == event.router and not life.process.dead
        match event:
            case Cut():
                fleet.network.cut(*ends)
            case Partition():
                seconds = event.seconds
                fleet.network.partition(*ends, seconds)
            case Slow():
                fleet.network.slow(*ends, event.delay, event.seconds)
                return
        fleet.down(ends, seconds)

    def _kill(self, event: Kill) -> None:
        fleet, slot = self.fleet, event.process
        if slot == "holder":
            self._kill_holder(event)
        elif slot in fleet.replicas:
            fleet.kill_replica(fleet.replicas[slot], event.back, event.silently)
        elif slot in fleet.routers:
            self._kill_router(fleet.routers[slot], event)

    def _leap(self, process: SimulatedProcess | None, event: Leap | SetClock) -> None:
        if process is None or process.dead:
            return
        if isinstance(event, SetClock):
            process.ahead += event.seconds
        else:
            process.leap(event.seconds)
            self.fleet.down((event.process,), 0.0)

    def _stop(self, process: SimulatedProcess | None, event: Stop) -> None:
        if process is None or not process.runs:
            return
        process.stop()
        self.fleet.router_losses += event.process in self.fleet.routers  # for its clients, if it takes long
        self.fleet.down((event.process,), event.seconds)
        self.fleet.after(event.seconds, process.go_on)

    def _kill_router(self, life: RouterLife, event: Kill) -> None:
        self.fleet.kill_router(life, event.back, event.silently)
        for answer in self.answers:
            if answer.router is life and not answer.ends:
                self.end(answer, GONE)

    def _kill_holder(self, event: Kill) -> None:
        self.holder.kill()
        self.fleet.after(NOTICE, self.proxy.died)
        self.fleet.router_set.forget(self.holder)
        self.fleet.network.died(self.holder, event.silently)
        for answer in self.answers:
            if not answer.ends:
                self.end(answer, GONE)
        self._start_holder()

    def _arrive(self, asked: Arrive) -> None:
        answer = Answer(asked, f"r{len(self.answers)}", began=self.loop.now)
        self.answers.append(answer)
        if self.history.ingress:
            client = KeptClient if asked.kept else HttpClient
            answer.task = self.holder.spawn(client(self, answer).ask(self.front))
            return
        routers = [life for life in self.fleet.routers.values() if not life.process.dead]
        if not routers:
            self.end(answer, GONE)
            return
        life = answer.router = routers[asked.router % len(routers)]
        answer.task = life.process.spawn(ask_dispatcher(self, answer, life))


class _Errors(logging.Handler):
    """Keeps what the product logs as a failure of its own: errors with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.told.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def entropy(seed: int, loop: SimulatedLoop) -> Iterator[None]:
    """Have ids and the time of day come from the history."""
    rng = Random(seed)
    before = secrets.token_hex, secrets.randbits, secrets.token_urlsafe, time.time, time.monotonic

    def token_hex(nbytes: int | None = None) -> str:
        size = nbytes or 32
        return f"{rng.getrandbits(8 * size):0{2 * size}x}"

    secrets.token_hex = token_hex
    secrets.randbits = rng.getrandbits  # type: ignore[assignment]
    secrets.token_urlsafe = token_hex

    def time_of_day() -> float:
        process = PROCESS.get()
        return 1.7e9 + loop.now + (0.0 if process is None else process.ahead)

    time.time, time.monotonic = time_of_day, loop.time
    piece, router_link.PIECE = router_link.PIECE, PIECE
    try:
        yield
    finally:
        secrets.token_hex, secrets.randbits, secrets.token_urlsafe, time.time, time.monotonic = before
        router_link.PIECE = piece


def run(history: History, record: str | None = None, model: ServedModel | None = None) -> Outcome:
    """Run a history and return what came of it.

    record: folder where routers record their incidents. model: what they serve, where clients ask over HTTP.
    """
    if history.ingress and model is None:
        raise ValueError("a history over HTTP needs a model with a tokenizer")
    errors, root = _Errors(), logging.getLogger()
    root.addHandler(errors)
    loop = SimulatedLoop()
    asyncio.set_event_loop(loop)
    try:
        with entropy(history.seed, loop):
            world = World(history, loop, record, model)
            try:
                loop.run_until_complete(world.run())
            except StuckError as error:
                world.violations.append(str(error))
            turns, seconds = loop.turns, loop.now
            world.fleet.close_records()
            loop.abandon()
    finally:
        root.removeHandler(errors)
        asyncio.set_event_loop(None)
        loop.close()
    violations = [*world.violations, *loop.failures, *errors.told]
    whole = sum(answer.ends == [WHOLE] for answer in world.answers)
    ends = tuple(end for answer in world.answers for end in answer.ends)
    return Outcome(len(world.answers), whole, ends, tuple(violations), seconds, turns, checks.trace_of(world))
