"""Routers behind a guarded proxy, without Ray: each a whole front end with links of its own, which can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from types import TracebackType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.tenants import Tenancy
from cluster.answer_log import KEPT
from cluster.grpc_api.forwarded import ForwardedCalls
from cluster.grpc_api.gateway import ForwardingInterceptor, ForwardingService
from cluster.grpc_api.server import GrpcServer, ListenAddress
from cluster.http.app import build_app
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.let_go import LetGo
from cluster.ingress.router_link import ExchangeServer
from cluster.ingress.router_pool import KnownRouter, RouterPool
from cluster.ingress.router_side import IngressCheck
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts
from cluster.router.answer_copies import AnswerCopies
from cluster.router.dispatcher import Dispatcher
from cluster.router.models import Models
from cluster.telemetry.metrics import Metrics
from engine.config import EngineConfig
from engine.core import EngineCore
from tests.chaos.front import listen
from tests.chaos.streams import client_of
from tests.cluster.cluster_lab import until
from tests.fake_executor import FakeExecutor
from tests.grpc_client import LIMIT, grpc_services
from tests.openai_app import MODEL, front_for, served_model, serving
from tests.simulator.links import connect_local

BLOCK, CONTEXT, NUM_BLOCKS = 16, 4000, 2000
RETENTION = 60.0


class LabRouter:
    """One router. dead: set once it was killed; stopped: set while it does and says nothing."""

    def __init__(self, number: int, lab: RouterLab) -> None:
        self.name = f"router-{number}"
        self.dead = asyncio.Event()
        self.runs = asyncio.Event()
        self.runs.set()
        self.asked = 0
        self.said = 0
        self._lab = lab

    async def start(self) -> None:
        self.dispatcher = Dispatcher()
        for replica in self._lab.replicas:
            self.dispatcher.add_link(await connect_local(replica.serve, self.name))
        metrics = Metrics()
        self.copies = AnswerCopies([self.dispatcher], RETENTION)
        models = Models([front_for(self.dispatcher, self._lab.model, metrics)])
        self.app = build_app(
            models,
            metrics,
            lambda: {"ready": True, "replicas": []},
            response_retention=RETENTION,
            copies=self.copies,
        )
        self.letting_go = LetGo(ForwardedCalls(self.app, grpc_services(models, metrics)))
        self._app = IngressCheck(self.letting_go, self._lab.router_wait)
        self._server = ExchangeServer(self._answer)
        self.known = KnownRouter(self.name, await self._server.address("127.0.0.1"))

    def leave(self) -> None:
        """Tell gateways that it is to stop, and let go of what another one can go on with."""
        self._server.leave()
        self.letting_go.let_go()

    async def kill(self) -> None:
        """End it as a signal would: what it had on its way is gone."""
        self.dead.set()
        await self._server.close()
        await self.dispatcher.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on as Serve does: through a queue each way, until the router is dead (ASGI)."""
        answer: asyncio.Queue[Message] = asyncio.Queue()
        asked: asyncio.Queue[Message] = asyncio.Queue()
        self.asked += 1

        async def say(message: Message) -> None:
            await self.runs.wait()
            if not self.dead.is_set():
                self._lab.notes += KEPT in message
                answer.put_nowait(message)
                self.said += 1
                self._lab.on_message(self)

        over = asyncio.create_task(self.dead.wait())
        tasks = [
            over,
            asyncio.create_task(listen(receive, asked)),
            asyncio.create_task(self._app(scope, asked.get, say)),
        ]
        try:
            while True:
                coming = asyncio.create_task(answer.get())
                tasks.append(coming)
                await asyncio.wait((coming, over, tasks[2]), return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    return
                if not coming.done():
                    if answer.empty():
                        return
                    continue
                tasks.remove(coming)
                await send(coming.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one exchange of a gateway, until the router is dead (ASGI)."""
        self.asked += 1

        async def say(message: Message) -> None:
            await self.runs.wait()
            if not self.dead.is_set():
                self._lab.notes += KEPT in message
                await send(message)
                self.said += 1
                self._lab.on_message(self)

        tasks = [asyncio.create_task(self._app(scope, receive, say)), asyncio.create_task(self.dead.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class RouterLab:
    """Some routers over some replicas on the fake model, behind the guard. on_message: called as a router says one.

    gateway: between guard and routers is our own wire, and not what stands for Ray Serve's.
    """

    def __init__(
        self,
        folder: Path,
        routers: int = 2,
        pace: float = 0.0005,
        router_wait: float = 20.0,
        gateway: bool = False,
        replicas: str = "abc",
    ) -> None:
        self._names = replicas
        self._pool = RouterPool("gateway", router_wait) if gateway else None
        self.model = served_model(folder, max_model_len=CONTEXT)
        self.router_wait = router_wait
        self.on_message: Callable[[LabRouter], None] = lambda _: None
        self.routers: list[LabRouter] = []
        self.replicas: list[ReplicaCore] = []
        self.killed = 0
        self.steps = 0  # of all replicas
        self.notes = 0  # that routers have told the guard
        self._open: set[object] = set()  # exchanges
        self._waiting: set[object] = set()  # those that have got nothing since the last kill
        self._wanted = routers
        self._pace = pace
        self._made = 0
        self._came = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> RouterLab:
        self.replicas = [self._replica(name) for name in self._names]
        for _ in range(self._wanted):
            await self.add()
        guard = self._watched(RouterLossGuard(self._proxy, gateway=self._pool is not None))
        self.url = await self._stack.enter_async_context(serving(guard))
        if self._pool is not None:
            self.grpc_port = await self._start_grpc(guard, self._pool)
        self.client = await self._stack.enter_async_context(client_of(self.url))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await until(lambda: not any(replica.num_requests for replica in self.replicas))
        finally:
            await self._stack.aclose()
            for router in self.routers:
                await router.kill()
            await asyncio.gather(*self._tasks)
            for replica in self.replicas:
                await replica.close()

    async def _start_grpc(self, guard: ASGIApp, pool: RouterPool) -> int:
        service = ForwardingService(guard, lambda: pool.routers)
        server = GrpcServer(ListenAddress(), service, ForwardingInterceptor(Tenancy(), service), LIMIT)
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        return server.port

    async def add(self) -> LabRouter:
        """Start one more router."""
        router = LabRouter(self._made, self)
        self._made += 1
        await router.start()
        async with self._came:
            self.routers.append(router)
            self._came.notify_all()
        if self._pool is not None:
            task = asyncio.create_task(self._pool.hold(router.known))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return router

    def kill(self, router: LabRouter, successor_after: float | None = 0.01) -> None:
        """Kill a router now. successor_after: seconds until another one has started; None = none does."""
        if router.dead.is_set():
            return
        self.killed += 1
        router.dead.set()
        self.routers.remove(router)
        task = asyncio.create_task(self._succeed(router, successor_after))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _succeed(self, router: LabRouter, after: float | None) -> None:
        await router.kill()
        if after is not None:
            await asyncio.sleep(after)
            await self.add()

    async def _proxy(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the router answer that was asked the fewest times, be it stopped; wait for one where there is none."""
        if scope["type"] != "http":
            await self._lifespan(receive, send)
            return
        if self._pool is not None:
            await self._pool(scope, receive, send)
            return
        async with self._came:
            await self._came.wait_for(lambda: self.routers)
        await min(self.routers, key=lambda one: one.asked)(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def struck(self, rng: Random, streams: bool = True, steps: int = 100) -> None:
        """Kill a router each time that the replicas have made so many steps more, however long these take.

        And each answer has come on since, for what kills three routers in a row is given up. streams: clients see it.
        """
        while True:
            wanted, noted, self._waiting = self.steps + steps, self.notes, set(self._open) if streams else set()

            def may_strike() -> bool:
                told = self.notes - noted >= 2 * len(self._open)  # noqa: B023
                return bool(self.steps >= wanted and told and self.routers and not self._waiting)  # noqa: B023

            await until(may_strike, deadline=60)
            self.kill(rng.choice(self.routers))

    def _watched(self, app: ASGIApp) -> ASGIApp:
        """Take note of who waits for the next piece of an answer."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            name = object()

            async def seen(message: Message) -> None:
                await send(message)
                if message.get("body"):
                    self._waiting.discard(name)

            self._open.add(name)
            try:
                await app(scope, receive, seen)
            finally:
                self._open.discard(name)
                self._waiting.discard(name)

        return call

    def _step(self) -> float:
        self.steps += 1
        return self._pace

    def _replica(self, name: str) -> ReplicaCore:
        vocab = self.model.vocab_size
        config = EngineConfig("fake", max_model_len=CONTEXT, max_num_seqs=64, block_size=BLOCK)
        executor = FakeExecutor(NUM_BLOCKS, BLOCK, vocab, lambda _: self._step())
        engine = EngineCore(config, executor, (self.model.tokenizer.eos_token_id or 0,), vocab, NUM_BLOCKS)
        return ReplicaCore(engine, ReplicaFacts(name, MODEL, CONTEXT, vocab, BLOCK, NUM_BLOCKS - 1, (), "fake"))
