"""Connections that mean harm, by raw HTTP/2 frames: they reset each call, say nothing, send headers without end."""

import asyncio
import select
import socket
import struct
import threading
from contextlib import contextmanager

import grpc
import pytest

from cluster.grpc_api import server
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from tests.fake_source import FakeSource
from tests.grpc_client import gathered, serving_grpc
from tests.openai_app import MODEL, served_model

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Types of frames, and the flag of the last part of headers. Source: RFC 9113, section 6.
HEADERS, RST_STREAM, SETTINGS, CONTINUATION, END_HEADERS = 1, 3, 4, 9, 4
CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/squadron.v1.Inference/Generate",
    ":authority": "x",
    "content-type": "application/grpc",
    "te": "trailers",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without an entry in any table (RFC 7541, section 6.2.2); both have less than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    return connection


@contextmanager
def resetting(port: int):
    """A connection that opens calls and resets each at once, as fast as it can."""
    over = threading.Event()
    headers = b"".join(literal(*field) for field in CALL.items())
    cancel = struct.pack("!I", 8)
    begun = threading.Event()

    def go() -> None:
        with connected(port) as connection:
            stream = 1
            while not over.is_set():
                calls = range(stream, stream + 200, 2)
                connection.sendall(
                    b"".join(
                        frame(HEADERS, END_HEADERS, one, headers) + frame(RST_STREAM, 0, one, cancel) for one in calls
                    )
                )
                stream += 200
                if stream > 2_000:
                    begun.set()
                while select.select([connection], [], [], 0)[0] and connection.recv(1 << 20):
                    continue

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield begun
    finally:
        over.set()
        thread.join()


async def answered(port: int) -> list[int]:
    """Ask from a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        asked = pb.GenerateRequest(
            model=MODEL, prompt="hi", sampling=pb.Sampling(max_tokens=4, ignore_eos=True), output=pb.OUTPUT_TOKENS
        )
        return (await gathered(InferenceStub(channel).Generate(asked, timeout=3))).token_ids[0]


async def test_a_connection_that_resets_every_call_holds_up_nobody(model):
    async with serving_grpc(FakeSource(lambda *_: range(4)), model) as served:
        calm = await answered(served.server.port)
        with resetting(served.server.port) as begun:
            assert await asyncio.to_thread(begun.wait, 5)
            assert [await answered(served.server.port) for _ in range(4)] == [calm] * 4


@pytest.mark.parametrize("said", [b"", PREFACE[:10]])
async def test_a_connection_that_never_speaks_http_is_closed(model, monkeypatch, said):
    monkeypatch.setattr(server, "HANDSHAKE_MS", 200)
    async with serving_grpc(FakeSource(lambda *_: range(4)), model) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(said)
        async with asyncio.timeout(5):
            while await reader.read(1 << 16):  # the server's settings, until it hangs up
                continue
        writer.close()


async def test_a_connection_without_calls_is_closed_and_its_client_connects_anew(model, monkeypatch):
    monkeypatch.setattr(server, "IDLE_MS", 100)
    async with serving_grpc(FakeSource(lambda *_: range(4)), model) as served:
        asked = pb.HealthRequest()
        await served.stub.Health(asked)
        async with asyncio.timeout(5):
            while (state := served.channel.get_state()) is grpc.ChannelConnectivity.READY:
                await served.channel.wait_for_state_change(state)
        await served.stub.Health(asked)


async def test_headers_without_end_hold_up_nobody(model):
    """A block of headers goes on in further frames, without end."""
    async with serving_grpc(FakeSource(lambda *_: range(4)), model) as served:
        calm = await answered(served.server.port)
        _, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        writer.write(frame(HEADERS, 0, 1, b"".join(literal(*field) for field in CALL.items())))
        block = frame(CONTINUATION, 0, 1, literal("x-long", "a" * 100) * 100)
        for _ in range(200):
            writer.write(block)
            await writer.drain()
        assert await answered(served.server.port) == calm
        writer.close()
