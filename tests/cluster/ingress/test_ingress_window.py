"""How far a router may be ahead of its client: what the guard tells, and what a router does with it."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.http.asgi import until_disconnect
from cluster.http.endpoints import Responder
from cluster.ingress import exchange
from cluster.ingress.attempt import ASKS_TAKEN, TAKEN, TELL_BYTES, TELL_LEAST, TELL_SECONDS
from cluster.ingress.guard import MARK, TELLS_TAKEN, WINDOWED, RouterLossGuard
from cluster.ingress.router_side import WINDOW, IngressCheck
from tests.simulator.virtual_time import run_virtually

EVENTS = [(b"content-type", b"text/event-stream")]
PART = 1 << 14


def start(asks: bool = True) -> dict:
    return {"type": "http.response.start", "status": 200, "headers": EVENTS} | ({ASKS_TAKEN: True} if asks else {})


def part(size: int = PART, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": b"x" * size, "more_body": more}


class Client:
    """One that reads when it is let. `gone`: set once it has hung up. sent: what came to it."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = asyncio.Event()
        self.gone = asyncio.Event()
        self.sent: list[dict] = []
        if reads:
            self.reads.set()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.reads.wait()
        self.sent.append(message)


# --- what the guard tells


async def told(messages: list[dict], pause: float = 0.0) -> list[dict]:
    """What a router hears while it sends `messages`, `pause` seconds apart, to a client that hangs up in the end."""
    client, heard = Client(), []

    async def serve(scope, receive, send) -> None:
        async def listen() -> None:
            while not heard or heard[-1]["type"] != "http.disconnect":
                heard.append(await receive())

        listening = asyncio.create_task(listen())
        for message in messages:
            await send(message)
            await asyncio.sleep(pause)
        client.gone.set()
        await listening

    await RouterLossGuard(serve)({"type": "http", "path": "/", "headers": []}, client.receive, client.send)
    assert [one["type"] for one in client.sent].count("http.response.start") == 1
    assert not any(ASKS_TAKEN in one for one in client.sent)
    return heard


async def test_it_tells_what_the_client_has_taken_now_and_then():
    heard = await told([start(), *[part()] * 40, part(0, more=False)])
    first, second = [one["bytes"] for one in heard[:-1]]
    assert 0 <= first - TELL_BYTES <= 2 * PART
    assert 0 <= second - 2 * TELL_BYTES <= 2 * PART
    assert heard[-1] == {"type": "http.disconnect"}


def test_what_a_slow_client_takes_is_told_sooner():
    every = TELL_SECONDS / 2
    heard = run_virtually(told([start(), *[part(TELL_LEAST // 4)] * 16, part(0, more=False)], pause=every))
    assert [one["bytes"] for one in heard[:-1]] == [TELL_LEAST * times for times in (1, 2, 3, 4)]


async def test_nothing_is_told_to_an_app_that_does_not_ask():
    heard = await told([start(asks=False), *[part()] * 100, part(0, more=False)])
    assert heard == [{"type": "http.disconnect"}]


def test_a_client_that_takes_nothing_for_very_long_has_left_as_far_as_the_router_can_see():
    async def play():
        client, heard = Client(reads=False), []

        async def serve(scope, receive, send) -> None:
            async def listen() -> None:
                heard.append(await receive())

            listening = asyncio.create_task(listen())
            await send(start())
            await send(part())
            await listening

        await RouterLossGuard(serve)({"type": "http", "path": "/", "headers": []}, client.receive, client.send)
        assert heard == [{"type": "http.disconnect"}]
        assert not client.sent, "nor is it told that its router was lost"
        assert asyncio.get_running_loop().time() == pytest.approx(exchange.STALLED)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run_virtually(play())


# --- what the router does


class Sending:
    """A router's app behind `IngressCheck` that sends parts without end, and its ingress. taken: bytes."""

    def __init__(self, mark: bytes | None = TELLS_TAKEN) -> None:
        self.sent = 0
        self.last_sent = False
        self.arriving: asyncio.Queue[dict] = asyncio.Queue()
        headers = [] if mark is None else [(MARK, mark)]
        self.scope = {"type": "http", "headers": headers}
        self.task = asyncio.create_task(IngressCheck(self._app)(self.scope, self.arriving.get, self._to_ingress))

    async def _app(self, scope, receive, send) -> None:
        listening = asyncio.create_task(self._until_gone(receive))
        sending = asyncio.create_task(self._send(send))
        await listening
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await send(part(1, more=False))
        self.last_sent = True

    async def _until_gone(self, receive) -> None:
        while (message := await receive())["type"] not in ("http.disconnect", "stop"):
            assert message["type"] != TAKEN, "the app knows nothing of it"

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        while self.sent < 100 * WINDOW:
            await send(part())

    async def _to_ingress(self, message: dict) -> None:
        self.sent += len(message.get("body", b""))

    async def settled(self) -> int:
        """Bytes sent, once nothing more is."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.01)
        return before

    async def stop(self) -> None:
        self.arriving.put_nowait({"type": "stop"})
        await self.task


async def test_a_router_sends_no_more_than_a_window_beyond_what_was_taken():
    sending = Sending()
    assert await sending.settled() == WINDOW
    assert sending.scope["state"][WINDOWED]
    for taken in (PART, 10 * PART):
        sending.arriving.put_nowait({"type": TAKEN, "bytes": taken})
        assert await sending.settled() == WINDOW + taken
    await sending.stop()
    assert sending.last_sent, "a stream can be ended whose client reads no more"


async def test_a_client_that_hangs_up_lets_go_of_what_waits_for_it():
    sending = Sending()
    assert await sending.settled() == WINDOW
    sending.arriving.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(sending.task, 10)


@pytest.mark.parametrize("mark", [None, b"1"], ids=["no guard", "an earlier one"])
async def test_nobody_waits_for_a_guard_that_tells_nothing(mark):
    sending = Sending(mark)
    assert await sending.settled() == 100 * WINDOW
    assert WINDOWED not in sending.scope.get("state", {})
    await sending.stop()


# --- both together


async def test_a_stream_whose_client_reads_no_more_ends_with_the_typed_error():
    class Endless(Responder):
        async def _respond(self, scope, receive, answer) -> None:
            async def work() -> None:
                while True:
                    await answer.events(b"data: " + b"x" * PART + b"\n\n")

            await until_disconnect(receive, work(), answer, patience=0.05)

    client, exchange = Client(reads=False), {"id": "req-1", "client_id": "", "tenant": "t"}
    router = IngressCheck(Endless())
    passed: asyncio.Queue[dict] = asyncio.Queue()

    async def serve(scope, receive, send) -> None:
        scope["state"] = {"exchange": exchange}
        await router(scope, receive, passed.put)
        client.reads.set()
        while not passed.empty():
            await send(passed.get_nowait())

    await RouterLossGuard(serve)({"type": "http", "path": "/", "headers": []}, client.receive, client.send)
    body = b"".join(one.get("body", b"") for one in client.sent)
    assert len(body) < WINDOW + 3 * PART
    error = json.loads(body.rpartition(b"data: ")[2])["error"]
    assert (error["code"], error["retryable"], error["request_id"]) == ("slow_consumer", False, "req-1")
    assert exchange["error"] == "slow_consumer"
    assert not client.sent[-1].get("more_body")
