"""The processes of a simulated cluster and what Ray Serve does for them: who is there, leases, and successors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
from starlette import routing
from starlette.types import ASGIApp

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.tenants import Tenancy
from cluster.config import ClusterConfig
from cluster.http import app
from cluster.http.ui import ui_route
from cluster.ingress.router_side import IngressCheck
from cluster.lifecycle.leases import ReplicaWatch
from cluster.openai.served_model import ServedModel
from cluster.replica.core import ReplicaCore
from cluster.replica.engine_thread import EngineListener
from cluster.replica.sessions import ReplicaFacts
from cluster.router.directory import Connect, ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from cluster.router.incidents import IncidentLog, RecordedSource
from cluster.router.live_model import admission_queue, dispatcher_config
from cluster.router.models import ModelFront, Models
from cluster.simulator.engine import FIRST_TOKEN, ModelledExecutor, SimulatedEngine, StepTimes, simulated_tokens
from cluster.simulator.history import History
from cluster.simulator.network import NOBODY, Network
from cluster.simulator.process import SimulatedLoop, SimulatedProcess
from cluster.simulator.stub_core import BASE, PER_SEQUENCE, StubCore, hashed_token
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from cluster.token_source import TokenSource
from cluster.wire.link import Announcement, LinkAddress, ReplicaLink
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.report import StepReport
from engine.request import Request

MODEL = "demo"
CONFIG = ClusterConfig(model=MODEL)
VOCAB, CONTEXT, BLOCK, BLOCKS, CHUNK = 400, 4096, 16, 512, 16
NOTICE = 0.1  # seconds until Serve knows that a process is dead


@cache
def config_of(seats: int) -> ClusterConfig:
    """Return the default settings for replicas that run so many sequences at once."""
    return ClusterConfig(model=MODEL, max_num_seqs=seats)


class CheckedCore(EngineCore):
    """An engine that checks itself after every step."""

    def step(self) -> StepReport:
        """Run a step."""
        report = super().step()
        self.check_integrity()
        return report


def token_at(history: History, version: int, seed: int, choice: int, position: int) -> int:
    """Return the token that a model version draws."""
    if history.real_engine:
        mixed = np.array([seed + 7919 * choice]), np.array([position])
        return int(simulated_tokens(*mixed, VOCAB - FIRST_TOKEN)[0])
    return hashed_token(version, seed, choice, position, VOCAB)


_ui_route, _compile_path = cache(ui_route), cache(routing.compile_path)


@contextmanager
def memoised() -> Iterator[None]:
    """Have the app's page and patterns of paths made once: they are the same in every router."""
    front: Any = app
    before = front.ui_route, routing.compile_path
    front.ui_route, routing.compile_path = _ui_route, _compile_path
    try:
        yield
    finally:
        front.ui_route, routing.compile_path = before


class ReplicaLife:
    """One life of a replica. over: its process has ended, and Serve knows it. drains: it is to go."""

    def __init__(self, fleet: Fleet, slot: str, version: int) -> None:
        self.slot = slot
        self.version = version
        self.name = fleet.new_name(slot)
        self.process = fleet.new_process(slot)
        self.over = asyncio.Event()
        self.drains = False
        self._fleet = fleet
        self.core: ReplicaCore = self.process.call(self._made)

    def _made(self) -> ReplicaCore:
        fleet, loop = self._fleet, self._fleet.loop
        core: Any
        if fleet.history.real_engine:
            config = EngineConfig(
                "simulated", max_model_len=CONTEXT, max_num_seqs=fleet.history.seats, block_size=BLOCK
            )
            times = StepTimes(BASE, BASE / CHUNK, PER_SEQUENCE, 0.0)
            executor = ModelledExecutor(times, VOCAB)
            core = CheckedCore(config, executor, (0,), VOCAB, BLOCKS, loop.time)

            def last_step() -> float:
                return executor.last_step

        else:
            core = StubCore(loop.time, VOCAB, fleet.history.seats, CHUNK, self.version, BLOCKS)

            def last_step() -> float:
                return core.last_step

        fingerprint = f"model-{self.version}"
        facts = ReplicaFacts(self.name, "simulated", CONTEXT, VOCAB, BLOCK, BLOCKS - 1, fingerprint=fingerprint)

        def engine(core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> SimulatedEngine:
            return _MortalEngine(core, loop, listener, last_step, self._begins)

        return ReplicaCore(core, facts, None, incarnation=fleet.rng.getrandbits(62), engine=engine, clock=loop.time)

    def _begins(self, requests: list[Request]) -> None:
        self._fleet.seeds.update([request.seed for request in requests])
        if any(request.seed in self._fleet.poison for request in requests):
            self._fleet.after(0.001, self._fleet.poisoned, self)


class _MortalEngine(SimulatedEngine):
    """Says to `begins` what each step is the first for."""

    def __init__(
        self,
        core: EngineCore,
        loop: asyncio.AbstractEventLoop,
        listener: EngineListener,
        step_seconds: Callable[[], float],
        begins: Callable[[list[Request]], None],
    ) -> None:
        self._begins = begins
        super().__init__(core, loop, listener, step_seconds)

    def _begin(self, requests: list[Request]) -> None:
        super()._begin(requests)
        self._begins(requests)


class RouterLife:
    """One life of a router. known: whether Serve still sends requests to it."""

    def __init__(self, fleet: Fleet, slot: str) -> None:
        self.slot = slot
        self.name = fleet.new_name(slot)
        self.process = fleet.new_process(slot)
        self.asked = 0
        self.over = asyncio.Event()
        self.app: ASGIApp
        self.dispatcher: Dispatcher
        self._fleet = fleet
        self.process.call(self._make)

    def _make(self) -> None:
        fleet = self._fleet
        self.dispatcher = Dispatcher(dispatcher_config(CONFIG), Random(fleet.rng.getrandbits(32)))
        leases: Any = _LeaseHandle(fleet, self)
        connect: Connect = self._connect
        self.source: TokenSource = self.dispatcher
        if fleet.record is not None:
            incidents = IncidentLog(fleet.record, self.name, fleet.loop.time)
            fleet.records.append(incidents)
            connect, self.source = incidents.connecting(connect), RecordedSource(self.source, incidents)
        self.directory = ReplicaDirectory(self.name, leases, self.dispatcher, node="node", open_link=connect)
        self.admission: AdmissionQueue | None = None
        if fleet.model is not None:
            model, metrics = fleet.model, Metrics(fleet.loop.time)
            self.tenancy = Tenancy()
            self.admission = admission_queue(
                fleet.config, self.dispatcher, self.source, lambda: fleet.history.routers
            )
            front = ModelFront(
                model,
                self.admission,
                metrics.of(model.model_id, ReplicaSetStats),
                ready=lambda: self.dispatcher.ready,
                replicas=self.dispatcher.replicas,
                ask_router=self.dispatcher.explain,
            )
            with memoised():
                inner = app.build_app(
                    Models([front]), metrics, lambda: {"ready": True}, names_answers=False, tenancy=self.tenancy
                )
            self.app = IngressCheck(inner, CONFIG.router_wait)

    async def _connect(self, address: LinkAddress, router_id: str) -> ReplicaLink:
        fleet = self._fleet
        life = fleet.replica(address.host)
        ways = self.slot, life.slot
        return await fleet.network.connect(self.process, life.process, life.core.serve, router_id, ways)


@dataclass
class _LeaseHandle:
    """A router's handle of the replica deployment, as far as `ReplicaDirectory` uses one."""

    fleet: Fleet
    router: RouterLife
    deployment_name: str = "replicas"

    def options(self, stream: bool) -> _LeaseHandle:
        return self

    @property
    def lease(self) -> _LeaseHandle:
        return self

    def remote(self, router_id: str, node: str, watch: ReplicaWatch) -> Lease:
        return Lease(self.fleet, self.router, watch)


class Lease:
    """The stream that answers a lease call: the replica's announcement, then nothing until it ends."""

    def __init__(self, fleet: Fleet, router: RouterLife, watch: ReplicaWatch) -> None:
        self._fleet = fleet
        self._router = router
        self._watch = watch
        self._life: ReplicaLife | None = None

    def __aiter__(self) -> Lease:
        return self

    async def __anext__(self) -> Announcement:
        if self._life is not None:
            await self._life.over.wait()
            raise RuntimeError("the replica has ended")
        self._fleet.watch(self._router, self._watch)
        while True:
            fresh = [life for life in self._fleet.members() if life.name not in self._watch.known]
            # Serve asks those it chooses from how much they have to do, and takes none that does not answer.
            self._life = next((life for life in fresh if life.process.runs), None)
            if self._life is not None:
                address = LinkAddress(self._life.name, 1, "")
                return Announcement(self._life.name, address, {}, BLOCKS * BLOCK, (1,))
            # Serve's router looks again when the set changes and now and then.
            await self._fleet.changed_or(0.25)

    def cancel(self) -> None:
        """Give it back."""


class Fleet:
    """All processes by the name of their place (`router-0`, `replica-1`, `holder`), one life at a time in each.

    record: folder where routers record their incidents; None = nowhere. model: what they serve over HTTP; None = they
    are asked without.
    downs: when a place, or a way between two, did not work: (from, until).
    """

    def __init__(
        self, history: History, loop: SimulatedLoop, record: str | None = None, model: ServedModel | None = None
    ) -> None:
        self.history = history
        self.loop = loop
        self.rng = Random(history.seed)
        self.record = record
        self.model = model
        self.records: list[IncidentLog] = []
        self.network = Network(loop)
        self.routers: dict[str, RouterLife] = {}
        self.replicas: dict[str, ReplicaLife] = {}
        self.downs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        self.deaths = 0  # of replicas
        self.router_losses = 0
        self.skewed = history.updated > 0
        self.seeds: set[int] = set()  # of all that replicas have begun
        self.poison = {one.seed for one in history.arrivals if one.poison}
        self.all_routers: list[RouterLife] = []
        self.config = config_of(history.seats)
        self.all_replicas: dict[str, ReplicaLife] = {}
        self._serving: dict[str, ReplicaLife] = {}  # as Serve sees it
        self._watches: list[tuple[RouterLife, ReplicaWatch]] = []
        self._changed: list[asyncio.Future[None]] = []
        self._numbers: dict[str, int] = {}

    def new_name(self, slot: str) -> str:
        """Return the name of a new life."""
        self._numbers[slot] = self._numbers.get(slot, 0) + 1
        return f"{slot}.{self._numbers[slot]}"

    def new_process(self, slot: str) -> SimulatedProcess:
        """Return a new process, whose clock shows anything."""
        return SimulatedProcess(slot, self.loop, self.rng.uniform(0, 1e5))

    def start_replica(self, slot: str, version: int = 1) -> None:
        """Start a replica in a place and have Serve know it."""
        life = self.replicas[slot] = ReplicaLife(self, slot, version)
        self.all_replicas[life.name] = self._serving[life.name] = life
        self._tell()

    def start_router(self, slot: str) -> None:
        """Start a router in a place."""
        life = self.routers[slot] = RouterLife(self, slot)
        self.all_routers.append(life)
        self._wake()

    def replica(self, name: str) -> ReplicaLife:
        """Return a life of a replica."""
        return self.all_replicas[name]

    def process(self, slot: str) -> SimulatedProcess | None:
        """Return what lives in a place now."""
        life = self.routers.get(slot) or self.replicas.get(slot)
        return None if life is None else life.process

    def down(self, names: tuple[str, ...], seconds: float) -> None:
        """Note that a place, or a way, does not work from now on."""
        now = self.loop.now
        self.downs.setdefault(names, []).append((now, now + seconds))

    def close_records(self) -> None:
        """Record nothing more: all is over."""
        for one in self.records:
            one.close()

    def members(self) -> list[ReplicaLife]:
        """Return the replicas in Serve's set."""
        return list(self._serving.values())

    def watch(self, router: RouterLife, watch: ReplicaWatch) -> None:
        """Tell a router of Serve's set, now and whenever it changes."""
        if all(one is not watch for _, one in self._watches):
            self._watches.append((router, watch))
            router.process.call(watch.members_changed, self._ids())

    def kill_replica(self, life: ReplicaLife, back: float | None, silently: bool = False, version: int = 0) -> None:
        """End a replica, have Serve notice, and start another one."""
        if life.process.dead:
            return
        self.deaths += 1
        self.down((life.slot,), 1e9 if back is None else back)
        life.process.kill()
        self.network.died(life.process, silently)
        self.after(NOTICE, self._gone, life)
        if back is not None:
            self.after(back, self._succeed, life.slot, version or life.version)

    def poisoned(self, life: ReplicaLife) -> None:
        """End a replica that computed what kills it."""
        self.kill_replica(life, 0.5)

    def engine_dies(self, life: ReplicaLife, back: float) -> None:
        """Have a replica's engine fail, and its process end a moment later."""
        if life.process.runs:
            life.process.call(life.core.on_dead, "the engine failed")
        self.after(0.05, self.kill_replica, life, back)

    def drain(self, life: ReplicaLife, back: float, version: int) -> None:
        """Have a replica go, and another one come."""
        if life.process.dead or life.drains:
            return
        life.drains = True
        self.skewed |= version != life.version
        self.down((life.slot,), 1e9)  # until the other one is there
        life.process.call(life.core.drain)
        self._serving.pop(life.name, None)
        self._tell()
        life.process.spawn(self._leave(life, back, version))

    async def _leave(self, life: ReplicaLife, back: float, version: int) -> None:
        await life.core.drained()
        await asyncio.sleep(0.5)
        await life.core.close()
        self.after(0.0, self._left, life, back, version)

    def _left(self, life: ReplicaLife, back: float, version: int) -> None:
        if life.process.dead:
            return
        life.process.kill()
        self.network.died(life.process, silently=False)
        life.over.set()
        self.after(back, self._succeed, life.slot, version)

    def kill_router(self, life: RouterLife, back: float | None, silently: bool) -> None:
        """End a router, have Serve notice, and start another one."""
        if life.process.dead:
            return
        self.router_losses += 1
        self.down((life.slot,), 1e9 if back is None else back)
        life.process.kill()
        self.network.died(life.process, silently)
        self._watches = [one for one in self._watches if one[0] is not life]
        life.over.set()
        self.after(NOTICE, self._router_gone, life)
        if back is not None:
            self.after(max(back, NOTICE), self.start_router, life.slot)

    def _router_gone(self, life: RouterLife) -> None:
        if self.routers.get(life.slot) is life:
            del self.routers[life.slot]

    def _gone(self, life: ReplicaLife) -> None:
        life.over.set()
        self._serving.pop(life.name, None)
        self._tell()

    def _succeed(self, slot: str, version: int) -> None:
        if self.replicas[slot].process.dead:
            downs = self.downs.get((slot,), [])
            self.downs[slot,] = [(begin, min(end, self.loop.now)) for begin, end in downs]
            self.start_replica(slot, version)

    def _ids(self) -> frozenset[str]:
        return frozenset(self._serving)

    def _tell(self) -> None:
        for router, watch in self._watches:
            router.process.call(watch.members_changed, self._ids())
        self._wake()

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for one in waiting:
            _end(one)

    async def changed_or(self, seconds: float) -> None:
        """Wait until something changed, or so long."""
        change: asyncio.Future[None] = self.loop.create_future()
        self._changed.append(change)
        timer = self.loop.call_later(seconds, _end, change)
        try:
            await change
        finally:
            timer.cancel()

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do something later, whoever is dead then."""
        self.loop.call_later(seconds, do, *args, context=NOBODY)


def _end(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)
