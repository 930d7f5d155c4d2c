"""The wire between gateways and routers, where the lab of routers does not come: full buffers, crowds, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.answer_log import KEPT, NOTE
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_link import PIECE, ExchangeServer, RouterConnection
from cluster.ingress.router_pool import KnownRouter, RouterPool
from cluster.ingress.router_side import IngressCheck
from cluster.wire.frames import FrameServer, FrameStream, open_stream
from cluster.wire.link import LinkAddress, LinkClosedError, LinkLimits
from tests.cluster.cluster_lab import until

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
BIG = bytes(8 << 20)  # more than the kernel and the inbox of a peer hold


def scope_of(path: str) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "headers": []}


async def nothing_more() -> Message:
    """A client that has said all and waits."""
    return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def router(app) -> AsyncIterator[LinkAddress]:
    """A router's end of the wire around an application."""
    server = ExchangeServer(app)
    try:
        yield await server.address("127.0.0.1")
    finally:
        await server.close()


async def test_all_who_wait_for_room_go_on_when_there_is_some_and_when_there_never_will_be() -> None:
    came: asyncio.Queue[FrameStream] = asyncio.Queue()

    async def serve(stream: FrameStream) -> None:
        came.put_nowait(stream)
        await stream.over.wait()

    server = FrameServer(serve, LinkLimits())
    address = await server.start()
    try:
        for reads in (True, False):
            stream = await open_stream(address, LinkLimits())
            theirs = await came.get()
            theirs.send(BIG)
            waiting = [asyncio.create_task(theirs.room()) for _ in range(3)]
            await until(lambda: theirs.is_full)  # noqa: B023
            if reads:
                await stream.receive()
            else:
                stream.close()
            async with asyncio.timeout(10):
                await asyncio.gather(*waiting)
            stream.close()
    finally:
        await server.close()


async def test_a_router_that_only_takes_connections_is_not_held_for_longer_than_the_lease(monkeypatch) -> None:
    monkeypatch.setattr("cluster.ingress.router_pool.TICK", 0.02)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await nothing_more()

    monkeypatch.setattr(ExchangeServer, "_beat", lambda self, number, stream, gateway: stream.over.wait())
    async with router(app) as address, asyncio.timeout(10):
        known = KnownRouter("silent", address)
        await RouterPool("gateway", 1.0).hold(known)


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_router_that_works_for_longer_than_a_lease_is_not_left(monkeypatch, keeps) -> None:
    """What cannot be asked twice, as an upload, says now and then that its router lives, too."""
    for name in ("attempt.TICK", "router_side.BEAT", "router_side.NOTE_AFTER"):
        monkeypatch.setattr(f"cluster.ingress.{name}", 0.02)
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await send(START)
        await send({"type": "http.response.body", "body": b"done"})

    async def send(message: Message) -> None:
        sent.append(message)

    async with router(IngressCheck(app)) as address:
        guard = RouterLossGuard(KnownRouter("slow", address), gateway=True)
        await guard(scope_of("/v1/completions" if keeps else "/v1/files"), nothing_more, send)
    assert [one.get("status", one.get("body")) for one in sent] == [200, b"done"]


async def test_a_connection_that_is_full_holds_up_no_word_of_other_exchanges() -> None:
    """What a router says now and then of all its exchanges is said by one task."""
    sends: dict[str, Send] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sends[scope["path"]] = send
        await send(START)
        if scope["path"] == "/full":
            await send({"type": "http.response.body", "body": BIG, "more_body": True})
        await receive()

    async def reads_nothing(_: Message) -> None:
        await asyncio.get_running_loop().create_future()

    heard: list[Message] = []

    async def hear(message: Message) -> None:
        heard.append(message)

    async with router(app) as address:
        connections = [await RouterConnection.open(address) for _ in range(2)]
        asked = [
            asyncio.create_task(connections[0].exchange(scope_of("/full"), nothing_more, reads_nothing)),
            asyncio.create_task(connections[1].exchange(scope_of("/quiet"), nothing_more, hear)),
        ]
        await until(lambda: len(sends) == 2)
        await until(lambda: sends["/full"].__self__._stream.is_full)
        async with asyncio.timeout(5):
            for _ in range(3):
                for send in sends.values():
                    await send({"type": NOTE})
        await until(lambda: [one["type"] for one in heard].count(NOTE) == 3)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_three_hundred_exchanges_at_once_are_all_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with router(app) as address:
        pool = RouterPool("gateway", patience=10)
        holding = asyncio.create_task(pool.hold(KnownRouter("router", address)))

        async def ask(number: int) -> str:
            got: list[Message] = []
            asked = [{"type": "http.request", "body": b"", "more_body": False}]

            async def receive() -> Message:
                return asked.pop() if asked else await nothing_more()

            async def take(message: Message) -> None:
                got.append(message)

            await pool(scope_of(f"/{number}"), receive, take)
            return b"".join(one.get("body", b"") for one in got).decode()

        assert await asyncio.gather(*map(ask, range(300))) == [f"/{number}" for number in range(300)]
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def test_a_router_that_is_not_heard_gets_nothing() -> None:
    """Ray may reach it where the gateway does not, or it stops as it is found."""
    silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    pool = RouterPool("gateway", patience=0.1)
    holding = asyncio.create_task(pool.hold(KnownRouter("silent", LinkAddress("127.0.0.1", port, "s"))))
    got: list[Message] = []

    async def take(message: Message) -> None:
        got.append(message)

    await pool(scope_of("/"), nothing_more, take)
    assert got[0]["status"] == 503
    assert b"no_router" in got[1]["body"]
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    silent.close()


async def test_when_a_router_is_given_up_its_exchanges_are_over() -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await receive()

    async with router(app) as address:
        known = KnownRouter("router", address)
        asked = asyncio.create_task(known(scope_of("/"), nothing_more, _swallow))
        await begun.wait()
        known.close()
        async with asyncio.timeout(5):
            await asked
        assert known.load == 0


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
async def test_bodies_of_any_size_arrive_whole_and_notes_beside_them_once(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message["body"])
            more = message["more_body"]
        await send(START)
        await send({"type": "http.response.body", "body": b"".join(parts), KEPT: b"note"})

    got: list[dict[str, Any]] = []
    asked = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return asked.pop() if asked else await nothing_more()

    async def take(message: Message) -> None:
        got.append(dict(message))

    async with router(app) as address:
        connection = await RouterConnection.open(address)
        assert await connection.exchange(scope_of("/"), receive, take)
        connection.close()
    assert b"".join(one.get("body", b"") for one in got) == body
    assert [one.get("more_body", False) for one in got[1:]] == [True] * (len(got) - 2) + [False]
    assert [one[KEPT] for one in got if KEPT in one] == [b"note"]


async def test_a_client_whose_words_cannot_be_passed_on_ends_its_exchange() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def fails() -> Message:
        raise RuntimeError("gone")

    async with router(app) as address:
        connection = await RouterConnection.open(address)
        async with asyncio.timeout(5):
            assert not await connection.exchange(scope_of("/"), fails, _swallow)


async def test_a_router_of_another_version_is_refused() -> None:
    from cluster.ingress.router_link import _encode

    async def serve(stream: FrameStream) -> None:
        stream.send(_encode((0, {"type": "squadron.welcome", "version": 99})))
        with suppress(LinkClosedError):
            await stream.receive()

    server = FrameServer(serve, LinkLimits())
    with pytest.raises(ConnectionError, match="version 1"):
        await RouterConnection.open(await server.start())
    await server.close()


async def _swallow(_: Message) -> None:
    """A client that takes all."""
