"""Lives of replicas and routers: the product's own objects, each in a simulated process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
from starlette import routing
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.quotas import Quotas
from cluster.admission.tenants import Tenancy, Visit
from cluster.config import ClusterConfig
from cluster.http import app
from cluster.http.ui import ui_route
from cluster.ingress.gateway import GatewayApp
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.let_go import LetGo
from cluster.ingress.router_directory import RouterAnnouncement, RouterDirectory
from cluster.ingress.router_link import ExchangeServer
from cluster.ingress.router_pool import RouterPool
from cluster.ingress.router_side import IngressCheck
from cluster.openai.served_model import ServedModel
from cluster.replica.core import ReplicaCore
from cluster.replica.engine_thread import EngineListener
from cluster.replica.sessions import ReplicaFacts
from cluster.router.answer_copies import AnswerCopies
from cluster.router.directory import Connect, ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from cluster.router.incidents import IncidentLog, RecordedSource
from cluster.router.live_model import admission_queue, dispatcher_config
from cluster.router.models import ModelFront, Models
from cluster.router.sleeping import SleepingModel
from cluster.simulator.engine import FIRST_TOKEN, ModelledExecutor, SimulatedEngine, StepTimes, simulated_tokens
from cluster.simulator.history import FREE, LIMITED, History
from cluster.simulator.process import SimulatedProcess
from cluster.simulator.stub_core import BASE, PER_SEQUENCE, StubCore, hashed_token
from cluster.sleep_orders import OrderBook
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from cluster.token_source import TokenSource
from cluster.wire.link import Announcement, LinkAddress
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.report import StepReport
from engine.request import Request

MODEL = "demo"
VOCAB, CONTEXT, BLOCK, BLOCKS, CHUNK = 400, 4096, 16, 512, 16


@cache
def config_of(seats: int, replicas: int = 1, scaling: tuple[int, int] | None = None) -> ClusterConfig:
    """Return the default settings for so many replicas, which run so many sequences at once.

    scaling: the least and most replicas of an autoscaled deployment, which is quick to let replicas go.
    """
    given: dict[str, Any] = {"max_num_seqs": seats, "replicas": replicas}
    if scaling is not None:
        given |= {"min_replicas": scaling[0], "max_replicas": scaling[1]}
        given |= {"upscale_delay_s": 2.0, "downscale_delay_s": 4.0}
    return ClusterConfig(model=MODEL, **given)


CONFIG = config_of(256)
RETENTION = 600.0  # seconds for which kept answers are, after their end


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
        mixed = np.array([seed + 7919 * choice + 104729 * (version - 1)]), np.array([position])
        return int(simulated_tokens(*mixed, VOCAB - FIRST_TOKEN)[0])
    return hashed_token(version, seed, choice, position, VOCAB)


class ReplicaLife:
    """One life of a replica. over: its process has ended, and Serve knows it. drains: it is to go.

    version: of the model that it runs first. protocol: that its links speak. begins: told of requests that it begins.
    folder: says which version of the model is there to be read.
    """

    def __init__(
        self,
        slot: str,
        name: str,
        process: SimulatedProcess,
        history: History,
        version: int,
        protocol: int,
        incarnation: int,
        begins: Callable[[ReplicaLife, list[Request]], None],
        folder: Callable[[], int],
    ) -> None:
        self.slot = slot
        self.version = version
        self.protocol = protocol
        self.name = name
        self.process = process
        self.over = asyncio.Event()
        self.announcement = Announcement(name, LinkAddress(name, 1, ""), {}, BLOCKS * BLOCK, (1,))
        self.drains = False
        self._history = history
        self._incarnation = incarnation
        self._begins = begins
        self._folder = folder
        self.core: ReplicaCore = self.process.call(self._made)

    def _made(self) -> ReplicaCore:
        history, clock = self._history, asyncio.get_running_loop().time
        core: Any
        if history.real_engine:
            config = EngineConfig("simulated", max_model_len=CONTEXT, max_num_seqs=history.seats, block_size=BLOCK)
            times = StepTimes(BASE, BASE / CHUNK, PER_SEQUENCE, 0.0)
            executor = ModelledExecutor(times, VOCAB, self.version, self._folder)
            core = CheckedCore(config, executor, (0,), VOCAB, BLOCKS, clock)

            def last_step() -> float:
                return executor.last_step

        else:
            core = StubCore(clock, VOCAB, history.seats, CHUNK, self.version, BLOCKS)

            def last_step() -> float:
                return core.last_step

        fingerprint = f"model-{self.version}"
        facts = ReplicaFacts(self.name, "simulated", CONTEXT, VOCAB, BLOCK, BLOCKS - 1, fingerprint=fingerprint)

        def engine(core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener) -> SimulatedEngine:
            return _MortalEngine(core, loop, listener, last_step, lambda begun: self._begins(self, begun))

        return ReplicaCore(core, facts, None, incarnation=self._incarnation, engine=engine, clock=clock)


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


@dataclass(frozen=True, slots=True)
class Served:
    """What all routers of a history serve. model: over HTTP; None = they are asked without.

    record: folder where they record their incidents; None = nowhere.
    """

    history: History
    config: ClusterConfig
    model: ServedModel | None
    record: str | None


class RouterLife:
    """One life of a router. asked: how often Serve sent something to it. leaves: it is to go. killed: it was.
    apart: a gateway lost it while it lived.

    protocol: that its links speak. exchanges: of HTTP that are open. incidents: what it records, if it does.
    leases: its handle of the replica deployment, as far as `ReplicaDirectory` uses one. server: of a gateway's
    exchanges. announcement: to gateways. sleeping: puts its model to sleep, over HTTP. orders: to do so.
    """

    sleeping: SleepingModel

    server: ExchangeServer
    announcement: RouterAnnouncement

    def __init__(
        self,
        slot: str,
        name: str,
        process: SimulatedProcess,
        served: Served,
        protocol: int,
        seed: int,
        leases: Callable[[RouterLife], Any],
        connect: Callable[[RouterLife], Connect],
        orders: OrderBook,
    ) -> None:
        self._orders = orders
        self.slot = slot
        self.name = name
        self.process = process
        self.protocol = protocol
        self.asked = 0
        self.exchanges = 0
        self.leaves = False
        self.killed = self.apart = False
        self.over = asyncio.Event()
        self.incidents: IncidentLog | None = None
        self.admission: AdmissionQueue | None = None
        self.tenancy: WatchedTenancy
        self.letting_go: LetGo
        self.app: ASGIApp
        self._served = served
        self.process.call(self._make, seed, leases(self), connect(self))

    def _make(self, seed: int, leases: Any, connect: Connect) -> None:
        served, clock = self._served, asyncio.get_running_loop().time
        self.dispatcher = Dispatcher(dispatcher_config(served.config), Random(seed))
        self.source: TokenSource = self.dispatcher
        if served.record is not None:
            self.incidents = IncidentLog(served.record, self.name, clock)
            connect, self.source = self.incidents.connecting(connect), RecordedSource(self.source, self.incidents)
        self.directory = ReplicaDirectory(
            self.name,
            leases,
            self.dispatcher,
            node="node",
            open_link=connect,
            on_demand=served.config.max_replicas is not None,
            rouse=lambda: not served.config.scales_to_zero or bool(leases.membership.members),
        )
        if served.model is not None:
            self._serve(served.model, clock)

    def _serve(self, model: ServedModel, clock: Callable[[], float]) -> None:
        """Make what answers over HTTP."""
        history, metrics = self._served.history, Metrics(clock)
        self.tenancy = _tenancy(history)
        self.admission = admission_queue(self._served.config, self.dispatcher, self.source, lambda: history.routers)
        front = ModelFront(
            model,
            self.admission,
            metrics.of(model.model_id, ReplicaSetStats),
            ready=lambda: self.dispatcher.ready,
            replicas=self.dispatcher.replicas,
            ask_router=self.dispatcher.explain,
        )
        self.sleeping = SleepingModel(model.model_id, self.dispatcher, self.admission, self._orders)
        with memoised():
            inner = app.build_app(
                Models([front]),
                metrics,
                lambda: {"ready": True},
                names_answers=history.gateway,
                tenancy=self.tenancy,
                copies=AnswerCopies([self.dispatcher], RETENTION),
                response_retention=RETENTION,
            )
        self.letting_go = LetGo(inner)
        self.app = IngressCheck(self.letting_go, self._served.config.router_wait)
        if history.gateway:
            self.server = ExchangeServer(self._count)

    @property
    def is_leased(self) -> bool:
        """Whether a gateway has yet to do without it, for which Serve waits before it stops a router."""
        return self._served.history.gateway and bool(self.server._watches)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one exchange of a gateway, and count it (ASGI)."""
        self.exchanges += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.exchanges -= 1

    async def listen(self) -> None:
        """Take exchanges of gateways."""
        address = await self.server.address(self.name)
        self.announcement = RouterAnnouncement(self.name, self.name, address)


def gateway(gateway_id: str, config: ClusterConfig, routers: Any) -> GatewayApp:
    """Return the app of a gateway, in the process that is one. routers: its handle of their deployment."""
    pool = RouterPool(gateway_id, config.router_wait)
    RouterDirectory(gateway_id, "node", routers, pool)
    return GatewayApp(pool, RouterLossGuard(pool, asyncio.get_running_loop().time, gateway=True))


class WatchedTenancy(Tenancy):
    """Knows what has yet to be charged."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._visits: list[Visit] = []

    @property
    def num_open(self) -> int:
        """How many visits have not been closed."""
        self._visits = [one for one in self._visits if not one._closed]
        return len(self._visits)

    @override
    async def visit(self, *given: Any, **named: Any) -> Visit:
        visit = await super().visit(*given, **named)
        self._visits.append(visit)
        return visit


def _tenancy(history: History) -> WatchedTenancy:
    if history.quota is None:
        return WatchedTenancy()
    entries = [KeyEntry(hash_key(FREE), Tenant(FREE)), KeyEntry(hash_key(LIMITED), Tenant(LIMITED, history.quota))]
    return WatchedTenancy(FixedKeys(KeyRing(entries)), Quotas(time.time))  # the history's


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
