"""Clients that vanish, dawdle, or only hold connections open (FAULTS 22 to 24); others never notice."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.chaos.front import Front, body, raw_request, reset
from tests.chaos.streams import ERROR, WHOLE, check_exact, client_of, read_stream
from tests.cluster.cluster_lab import until

IDLE = 2000  # connections
LAST_CHUNK = b"\r\n0\r\n\r\n"
DESCRIPTORS = 2 * IDLE + 200  # both ends are in this process


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "unary"])
async def test_a_client_that_resets_at_any_phase_leaves_nothing(tmp_path: Path, stream: bool) -> None:
    async with Front(tmp_path) as front:
        whole = raw_request(body(1, 2000, stream=stream))
        head = whole.index(b"\r\n\r\n") + 4
        for length in (0, 10, head, head + 20, len(whole)):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(whole[:length])
            await writer.drain()
            await reset(writer)
        for tokens in (1, 20, 200):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(whole)
            before = front.dispatcher.counters.tokens
            await until(lambda before=before, tokens=tokens: front.dispatcher.counters.tokens >= before + tokens)
            await reset(writer)
            await front.quiet()
        outcomes = front.dispatcher.counters.outcomes
        assert outcomes["completed"] == 0, "a request ran to its end although nobody waited"
        assert outcomes["aborted"] >= 3
        assert (await front.ask(2)).kind == WHOLE


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "behind Serve's queues"])
async def test_a_reader_that_stops_is_not_generated_for_and_slows_nobody(tmp_path: Path, proxied: bool) -> None:
    async with Front(tmp_path, pace=0, max_pending_tokens=500, proxied=proxied) as front:
        oracle = [await front.ask(index, 200) for index in range(4)]
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", front.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        try:
            writer.write(raw_request(body(9, 7900, stream=True, logprobs=20)))
            await until(lambda: front.replica.num_requests == 1)
            beside = await asyncio.gather(*(front.ask(index, 200) for index in range(4)))
            check_exact(beside, oracle)
            gaps = [b - a for stream in beside for a, b in pairwise(stream.times)]
            assert max(gaps) < 2.0, "a token came late beside the slow reader"
            # What the kernel takes is sent, 500 tokens more are kept, and then the engine is rid of it.
            await until(lambda: front.replica.num_requests == 0 and front.held_blocks == 0, deadline=90)
            assert front.dispatcher.counters.tokens - 2 * 4 * 200 < 7900, "all of it was generated"
            assert front.proxy is None or front.proxy.most < 3 << 20, "the proxy has taken more than it should hold"
            # Megabytes through a window of 4 kB take as long as the kernel's timers like.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            rest = await read_response(reader)
            assert b"slow_consumer" in rest
            assert b"[DONE]" not in rest
        finally:
            writer.transport.abort()


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """Return a chunked response once it is whole; fails, saying how far it came, when nothing comes for long."""
    response = bytearray()
    while not response.endswith(LAST_CHUNK):
        try:
            some = await asyncio.wait_for(reader.read(1 << 16), 60)
        except TimeoutError:
            pytest.fail(f"nothing came for a minute after {len(response)} bytes: {bytes(response[-200:])!r}")
        assert some, f"the connection was closed after {len(response)} bytes"
        response += some
    return bytes(response)


async def test_thousands_of_idle_connections_keep_nobody_from_being_served(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS:
        pytest.skip(f"{IDLE} connections need {DESCRIPTORS} descriptors, and this system gives {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    try:
        async with Front(tmp_path) as front:
            oracle = [await front.ask(index) for index in range(8)]
            idle = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(IDLE)]
            for _, writer in idle[::2]:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            began = time.monotonic()
            check_exact(await asyncio.gather(*(front.ask(index) for index in range(8))), oracle)
            assert (await front.client.get("/health")).status_code == 200
            assert time.monotonic() - began < 10.0
            for _, writer in idle:
                writer.transport.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_streams_go_on_and_later_clients_are_served_once_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Front(tmp_path, pace=0.01) as front:
        oracle = [await front.ask(index, 100) for index in range(4)]
        running = [asyncio.create_task(front.ask(index, 100)) for index in range(4)]
        await until(lambda: front.dispatcher.num_live == 4)
        taken = [open_null() for _ in range(32)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(file.fileno() for file in taken) + 1, hard))
            taken += fill_descriptors()
            with pytest.raises(OSError, match="Too many open files"):
                await asyncio.open_connection("127.0.0.1", front.port)
            for file in taken[-1:]:
                file.close()  # one for the client; the server has none to accept it with
            late = asyncio.create_task(asyncio.open_connection("127.0.0.1", front.port))
            check_exact(await asyncio.gather(*running), oracle)
            _, writer = await late
            assert "out of system resource" in caplog.text
        finally:
            for file in taken:
                file.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer.close()
        # Over a new connection: the server may be about to end those that nobody used meanwhile.
        async with client_of(front.url) as client:
            check_exact([await read_stream(client, body(0, 100))], oracle[:1])
    assert ERROR not in {stream.kind for stream in oracle}


def open_null() -> BinaryIO:
    return open("/dev/null", "rb")


def fill_descriptors() -> list[BinaryIO]:
    """Open files until there is no descriptor left."""
    taken = []
    while True:
        try:
            taken.append(open_null())
        except OSError:
            return taken
