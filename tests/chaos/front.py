"""The whole way of a request without Ray: real HTTP, front end, dispatcher, scheduler, and a fake model.

What clients do to their connections is seen here in milliseconds, with every block accounted for.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_side import IngressCheck
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from engine.config import EngineConfig
from engine.core import EngineCore
from tests.chaos.streams import Stream, client_of, read_stream
from tests.cluster.cluster_lab import CheckedCore, until
from tests.fake_executor import FakeExecutor
from tests.openai_app import MODEL, app_for, served_model, serving
from tests.simulator.links import connect_local

BLOCK = 16
CONTEXT = 8000
NUM_BLOCKS = 600  # checked after each step, so no more than is needed


class Front:
    """A front end on a loopback port over one replica on the fake model; leaving it checks that nothing is left.

    pace: seconds of each step; 0 leaves out the check after each, too. max_pending_tokens: as in `DispatcherConfig`.
    proxied: clients come through the guarded proxy of Ray Serve, as far as its queues go.
    """

    def __init__(
        self, folder: Path, pace: float = 0.002, max_pending_tokens: int = 4096, proxied: bool = False
    ) -> None:
        self.model = served_model(folder, max_model_len=CONTEXT)
        self.proxy: ServeQueues | None = None
        self._proxied = proxied
        self._pace = pace
        self._config = DispatcherConfig(max_pending_tokens=max_pending_tokens)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Front:
        self.dispatcher = Dispatcher(self._config)
        self.replica = self._replica()
        self.dispatcher.add_link(await connect_local(self.replica.serve, "router"))
        app: ASGIApp = app_for(self.dispatcher, self.model)
        if self._proxied:
            self.proxy = ServeQueues(IngressCheck(app))
            app = RouterLossGuard(self.proxy)
        self.url = await self._stack.enter_async_context(serving(app))
        self.client = await self._stack.enter_async_context(client_of(self.url))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.quiet()
        finally:
            await self._stack.aclose()
            await self.dispatcher.close()
            await self.replica.close()

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def held_blocks(self) -> int:
        """KV blocks that some request holds."""
        stats = self.replica.stats
        return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached

    async def quiet(self) -> None:
        """Wait until no request lives and no block is held; requests must add up."""
        await until(lambda: not (self.dispatcher.num_live or self.replica.num_requests or self.held_blocks))
        counters = self.dispatcher.counters
        assert counters.accepted == counters.outcomes.total()
        assert not counters.misplaced_rows

    async def ask(self, index: int, tokens: int = 40, **changes: Any) -> Stream:
        """Read one stream of a set; equal numbers bring equal tokens."""
        return await read_stream(self.client, body(index, tokens, **changes))

    def _replica(self) -> ReplicaCore:
        vocab = self.model.vocab_size
        config = EngineConfig("fake", max_model_len=CONTEXT, max_num_seqs=64, block_size=BLOCK)
        executor = FakeExecutor(NUM_BLOCKS, BLOCK, vocab, lambda _: self._pace)
        core = CheckedCore if self._pace else EngineCore
        engine = core(config, executor, (self.model.tokenizer.eos_token_id or 0,), vocab, NUM_BLOCKS)
        return ReplicaCore(engine, ReplicaFacts("a", MODEL, CONTEXT, vocab, BLOCK, NUM_BLOCKS - 1))


class ServeQueues:
    """The part of Ray Serve's proxy that matters here: queues without bound between a router and its clients (ASGI).

    Source: ray/serve/_private/http_util.py, `MessageQueue`. held: bytes of bodies in all of them now; most: ever.
    """

    def __init__(self, router: ASGIApp) -> None:
        self.held = 0
        self.most = 0
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on, with a queue in each direction."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        answer: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: asyncio.Queue[Message] = asyncio.Queue()

        async def enqueue(message: Message) -> None:
            self.held += len(message.get("body", b""))
            self.most = max(self.most, self.held)
            answer.put_nowait(message)

        async def route() -> None:
            try:
                await self._router(scope, asked.get, enqueue)
            finally:
                answer.put_nowait(None)

        tasks = [asyncio.create_task(listen(receive, asked)), asyncio.create_task(route())]
        try:
            while (message := await answer.get()) is not None:
                await send(message)
                self.held -= len(message.get("body", b""))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not answer.empty() and (left := answer.get_nowait()) is not None:
                self.held -= len(left.get("body", b""))


async def listen(receive: Receive, asked: asyncio.Queue[Message]) -> None:
    """Put what a client sends into a queue, up to its leaving."""
    while (message := await receive())["type"] != "http.disconnect":
        asked.put_nowait(message)
    asked.put_nowait(message)


def body(index: int, tokens: int = 40, **changes: Any) -> dict[str, Any]:
    """Return request `index` of a set."""
    asked = {"model": MODEL, "prompt": f"request {index}", "max_tokens": tokens, "ignore_eos": True, "seed": index}
    return {**asked, "temperature": index % 2, **changes}


def raw_request(asked: dict[str, Any]) -> bytes:
    """Return the bytes of a POST of `asked`."""
    content = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a RST, as the kernel of a client does that died with unread data."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await asyncio.sleep(0)
