"""Clients that mean harm, against the HTTP server that Serve's proxy runs, with the limits that it is given."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
import uvicorn

from cluster.config import parse_config
from cluster.config_values import LEAST_CONNECTIONS
from cluster.ingress import bounded_http
from cluster.ingress.bounded_http import MAX_AHEAD, MAX_HEAD_BYTES, MAX_HEADERS, BoundedHttp
from engine.errors import ConfigError

SOON = 0.3  # seconds, in place of the product's 20
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


def error_in(answer: bytes) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n" in head.decode() + "\r\n"
    return json.loads(body)["error"]


class Listening:
    """A server, and the paths that its app was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.release = asyncio.Event()
        self.port = 0

    async def app(self, scope, receive, send) -> None:
        self.asked.append(scope["path"])
        if scope["path"] == "/early":  # answered before its body is there
            await self._answer(send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if scope["path"] == "/slow":
            await self.release.wait()
        await self._answer(send)

    async def _answer(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})

    async def open(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def told(self, said: bytes) -> bytes:
        """All that comes until the connection is closed."""
        reader, writer = await self.open()
        writer.write(said)
        try:
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def listening(**limits):
    one = Listening()
    http = partial(BoundedHttp, **limits)
    config = uvicorn.Config(one.app, port=0, http=http, lifespan="off", log_config=None, interface="asgi3")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        one.port = server.servers[0].sockets[0].getsockname()[1]
        yield one
    finally:
        one.release.set()
        server.should_exit = server.force_exit = True
        await running


@pytest.fixture
async def soon(monkeypatch):
    monkeypatch.setattr(bounded_http, "HEADERS_TIMEOUT", SOON)
    async with listening() as one:
        yield one


@pytest.fixture
async def usual():
    async with listening() as one:
        yield one


async def test_usual_requests_are_answered_on_one_connection(usual) -> None:
    reader, writer = await usual.open()
    for body in (b"one", b"two" * 100_000):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert usual.bodies[-1] == body
    writer.close()


@pytest.mark.parametrize("said", [b"", b"GE", GET, GET + b"X-Never: ", b"\r\n" * 20], ids=range(5))
async def test_who_does_not_finish_its_headers_is_told_and_closed(soon, said: bytes) -> None:
    answer = await soon.told(said)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert error_in(answer)["code"] == "request_timeout"
    assert b"headers" in answer
    assert soon.asked == []


async def test_headers_that_trickle_get_no_more_time(soon) -> None:
    reader, writer = await soon.open()
    end = asyncio.ensure_future(reader.read())
    writer.write(GET + b"X-Slow: ")
    async with asyncio.timeout(10):
        while not end.done():
            writer.write(b"a")
            await asyncio.wait([end], timeout=SOON / 10)
    # A byte that is sent after the answer has the system throw the answer away.
    assert isinstance(end.exception(), ConnectionError) or end.result().startswith(b"HTTP/1.1 408 ")
    assert soon.asked == []
    writer.close()


async def test_the_next_request_of_a_connection_has_the_same_limit(soon) -> None:
    answers = await soon.told(GET + b"\r\n" + GET + b"X-Slow: ")
    assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"HTTP/1.1 408 " in answers
    assert len(soon.asked) == 1


@pytest.mark.parametrize(
    ("first", "rest"),
    [(GET + b"\r\n", b"\r\n"), (b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n", b"body")],
    ids=["empty lines", "a body that nobody waits for"],
)
async def test_what_is_no_request_keeps_no_connection_open(soon, first: bytes, rest: bytes) -> None:
    """uvicorn ends its own wait for the next request with the first byte that arrives."""
    reader, writer = await soon.open()
    writer.write(first)
    await reader.readuntil(b"hi")
    writer.write(rest)
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_an_answer_under_way_is_not_cut_by_a_slow_next_request(soon) -> None:
    reader, writer = await soon.open()
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
    async with asyncio.timeout(10):
        while soon.asked != ["/slow"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * SOON)
        soon.release.set()
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def under_way(listening, following: bytes) -> bytes:
    """All that comes after a request whose answer is under way when the others come."""
    reader, writer = await listening.open()
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        while listening.asked != ["/slow"]:
            await asyncio.sleep(0.01)
        writer.write(following)
        await asyncio.sleep(0.1)
        listening.release.set()
        try:
            return await reader.read()
        except ConnectionResetError:  # closed with more to read
            return b""
        finally:
            writer.close()


async def test_so_many_requests_may_come_ahead_of_an_answer(soon) -> None:
    told = await under_way(soon, (GET + b"\r\n") * MAX_AHEAD)
    assert told.count(b"HTTP/1.1 200 OK\r\n") == MAX_AHEAD + 1


async def test_requests_without_end_ahead_of_an_answer_are_not_kept(usual) -> None:
    assert await under_way(usual, (GET + b"\r\n") * 5000) == b""
    assert usual.asked == ["/slow"]


async def test_what_is_no_http_is_not_told_in_the_middle_of_an_answer(usual) -> None:
    assert await under_way(usual, b"\x00\x01\r\n\r\n") == b""


async def test_a_slow_body_has_the_apps_limit_and_no_other(soon) -> None:
    reader, writer = await soon.open()
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
    for _ in range(4):
        await asyncio.sleep(SOON)
        writer.write(b"a")
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-A: b\r\n" * MAX_HEADERS + b"\r\n",
        GET + b"X-A: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"X-A: " + b"b" * 1_000_000,
        GET + b"X" * 1_000_000,
        b"GET /" + b"a" * 1_000_000,
        b"\r\n" * 500_000,
    ],
    ids=["many", "long", "endless value", "endless name", "endless path", "endless nothing"],
)
async def test_too_much_of_headers_is_refused(usual, head: bytes) -> None:
    try:
        answer = await usual.told(head)
    except ConnectionError:  # closed while more came: what was said is lost on the way
        answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert not answer or error_in(answer)["code"] == "headers_too_large"
    assert usual.asked == []
    assert (await usual.told(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_as_many_headers_as_are_allowed_are_taken(usual) -> None:
    more = b"X-A: b\r\n" * (MAX_HEADERS - 2) + b"Connection: close\r\n\r\n"
    assert (await usual.told(GET + more)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_trailers_count_as_headers(usual) -> None:
    assert (await usual.told(CHUNKED + b"0\r\n" + b"X-A: b\r\n" * 1000)) == b""
    assert usual.bodies == []
    ended = await usual.told(CHUNKED + b"0\r\nX-A: b\r\n\r\n" + GET + b"Connection: close\r\n\r\n")
    assert ended.count(b"200 OK") == 2


async def test_what_is_no_http_is_told_so(usual) -> None:
    assert b"400 Bad Request" in await usual.told(b"\x16\x03\x01 hello\r\n\r\n")


async def test_an_idle_connection_makes_room_for_a_new_one_and_one_that_is_answered_stays() -> None:
    async with listening(max_connections=6) as server, AsyncExitStack() as stack:  # of which one address has half

        async def opened(host: str = "127.0.0.1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(host, 0))
            stack.push_async_callback(end, writer)
            return reader, writer

        async def end(writer: asyncio.StreamWriter) -> None:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        busy = [await opened() for _ in range(2)]
        for _reader, writer in busy:
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        for number in range(8):  # each takes the place of one that is silent, in its head, or between requests
            reader, writer = await opened()
            writer.write((b"", b"GET / HT", GET + b"\r\n")[number % 3])
            if number % 3 == 2:
                assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")
        async with asyncio.timeout(10):
            assert (await server.told(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        third = await opened()
        third[1].write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        while len(server.asked) < 6:
            await asyncio.sleep(0.01)
        refused = await server.told(b"")
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 1\r\n" in refused
        error = error_in(refused)
        assert (error["code"], error["retryable"]) == ("overloaded", True)
        assert "6 connections are held at most, 3 of one address" in error["message"]
        reader, writer = await opened("127.0.0.2")
        writer.write(GET + b"\r\n")
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n"), "a probe's address has room"
        server.release.set()
        for reader, _writer in (*busy, third):
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_with_the_least_connections_a_stream_another_request_and_a_look_now_and_then_get_on() -> None:
    """All of one address, as behind a proxy: who serves here looks at the server, too."""
    async with listening(max_connections=LEAST_CONNECTIONS) as server, AsyncExitStack() as stack:
        stream = asyncio.create_task(server.told(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
        while not server.asked:
            await asyncio.sleep(0.01)
        for _ in range(3):
            reader, writer = await server.open()
            stack.callback(writer.close)
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200 OK\r\n")
        server.release.set()
        assert (await stream).startswith(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(ConfigError, match=f"^max_connections: .*{LEAST_CONNECTIONS}, not {LEAST_CONNECTIONS - 1}$"):
        parse_config({"model": "demo", "max_connections": LEAST_CONNECTIONS - 1})
