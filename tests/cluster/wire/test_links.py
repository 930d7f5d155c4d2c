"""Links: frames in order, bounded buffers, typed ends, and no stranger on the port."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cluster.wire import frames, tcp
from cluster.wire.codec import encode
from cluster.wire.link import (
    DAMAGED,
    ENGINE_DEAD,
    LOST,
    SLOW_CONSUMER,
    LinkAddress,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    MessageTooLargeError,
    OtherProtocolError,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.parts import PROTOCOL_VERSION
from cluster.wire.replica_messages import Draining, Rejected, Welcome
from cluster.wire.router_messages import Abort, Hello, Ping
from tests.simulator.links import FaultPlan, FaultyLink, connect_local

WELCOME = Welcome("a", 5, "fake", 100, 61, 4, 9)
Serve = Callable[[RouterLink], Awaitable[None]]
Open = Callable[..., Awaitable[ReplicaLink]]


async def silent(link: RouterLink) -> None:
    """A replica that says no more than its welcome."""
    link.send(WELCOME)
    await link.wait_closed()


@pytest.fixture(params=["local", "tcp"])
async def open_link(request) -> AsyncIterator[Open]:
    """Open a link to a replica that serves as told."""
    servers: list[tcp.LinkServer] = []
    links: list[ReplicaLink] = []

    async def opened(serve: Serve, limits: LinkLimits | None = None, router: str = "router") -> ReplicaLink:
        if request.param == "local":
            links.append(await connect_local(serve, router, limits))
        else:
            servers.append(tcp.LinkServer(serve, limits))
            links.append(await tcp.connect(await servers[-1].start(), router, limits))
        return links[-1]

    yield opened
    for link in links:
        link.close()
        await asyncio.wait_for(link.wait_closed(), 10)
    for server in servers:
        await server.close()


async def echo(link: RouterLink) -> None:
    """Answers each abort with a rejection of the same stream."""
    link.send(WELCOME)
    while True:
        message = await link.receive()
        if isinstance(message, Abort):
            link.send(Rejected(message.stream, "echo", ""))


def forgiving(serve: Serve) -> Serve:
    """Let a server end quietly when its link does, as `ReplicaCore.serve` does."""

    async def served(link: RouterLink) -> None:
        try:
            await serve(link)
        except LinkClosedError as error:
            ends.append(error.code)
        ended.set()

    ends: list[str] = []
    ended = asyncio.Event()
    served.ends = ends
    served.ended = ended
    return served


async def test_messages_arrive_in_order(open_link):
    link = await open_link(forgiving(echo))
    assert link.welcome == WELCOME
    assert (link.replica_id, link.incarnation) == ("a", 5)
    for stream in range(200):
        link.send(Abort(stream))
    assert [(await link.receive()).stream for _ in range(200)] == list(range(200))


async def test_router_hears_why_the_replica_ended_the_link_after_all_it_sent(open_link):
    async def serve(link: RouterLink) -> None:
        link.send(WELCOME)
        link.send(Draining())
        link.close(ENGINE_DEAD, "rank 1: killed")

    link = await open_link(serve)
    assert await link.receive() == Draining()
    with pytest.raises(LinkClosedError) as caught:
        await link.receive()
    assert (caught.value.code, caught.value.message) == (ENGINE_DEAD, "rank 1: killed")
    assert link.closed
    with pytest.raises(LinkClosedError):
        link.send(Ping())


async def test_replica_hears_that_the_router_left(open_link):
    serve = forgiving(echo)
    link = await open_link(serve)
    link.close()
    await asyncio.wait_for(serve.ended.wait(), 5)
    assert serve.ends == ["closed"]


async def test_receiver_is_woken_when_its_own_end_closes(open_link):
    link = await open_link(silent)
    receiving = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    link.close("stalled", "nothing heard")
    with pytest.raises(LinkClosedError) as caught:
        await asyncio.wait_for(receiving, 5)
    assert caught.value.code == "stalled"


async def test_cancelled_receiver_is_cancelled(open_link):
    link = await open_link(silent)
    receiving = asyncio.create_task(link.receive())
    await asyncio.sleep(0.01)
    receiving.cancel()
    await asyncio.wait([receiving])
    assert receiving.cancelled()


async def test_router_that_does_not_read_is_cut_off_with_a_reason(open_link):
    async def flood(link: RouterLink) -> None:
        link.send(WELCOME)
        await link.receive()
        while True:
            link.send(Rejected(1, "x", "y" * 4000))

    serve = forgiving(flood)
    link = await open_link(serve, LinkLimits(max_down_bytes=2**20))
    link.send(Ping())
    await asyncio.wait_for(serve.ended.wait(), 5)
    assert serve.ends == [SLOW_CONSUMER]
    with pytest.raises(LinkClosedError) as caught:
        while True:
            await asyncio.wait_for(link.receive(), 5)
    assert caught.value.code == SLOW_CONSUMER


async def test_replica_that_does_not_read_is_cut_off(open_link):
    async def deaf(link: RouterLink) -> None:
        link.send(WELCOME)
        await link.wait_closed()

    link = await open_link(deaf, LinkLimits(max_up_bytes=2**18))
    with pytest.raises(LinkClosedError) as caught:
        for stream in range(10**6):
            link.send(Abort(stream))
    assert caught.value.code == SLOW_CONSUMER


async def test_message_above_the_limit_is_refused_and_the_link_goes_on(open_link):
    serve = forgiving(echo)
    link = await open_link(serve, LinkLimits(max_message_bytes=4096))
    with pytest.raises(MessageTooLargeError):
        link.send(Hello("x" * 5000))
    link.send(Abort(7))
    assert (await link.receive()).stream == 7


@pytest.mark.parametrize("side", ["router", "replica"])
async def test_damaged_message_closes_the_link(open_link, side):
    async def serve(link: RouterLink) -> None:
        link.send(WELCOME)
        if side == "router":
            link.send(Ping())  # not for routers: what a damaged frame looks like to the receiver
        await link.receive()

    served = forgiving(serve)
    link = await open_link(served)
    if side == "replica":
        link.send(Draining())
    with pytest.raises(LinkClosedError) as caught:
        await asyncio.wait_for(link.receive(), 5)
    assert caught.value.code == DAMAGED
    await asyncio.wait_for(served.ended.wait(), 5)


async def test_replica_that_hangs_up_at_once_refuses_the_link(open_link):
    async def serve(link: RouterLink) -> None:
        link.close(ENGINE_DEAD, "rank 1: killed")

    with pytest.raises(LinkRefusedError, match="rank 1"):
        await open_link(serve)


@pytest.fixture
async def address() -> AsyncIterator[LinkAddress]:
    """Where a replica listens that answers."""
    server = tcp.LinkServer(forgiving(echo))
    yield await server.start()
    await server.close()


async def test_stranger_is_unauthenticated(address):
    for secret in ("", "wrong", address.secret[:-1], address.secret + "x", "x" * 5000):
        with pytest.raises(LinkRefusedError, match=r"(?i)unauthenticated|longer than 1024"):
            await tcp.connect(LinkAddress(address.host, address.port, secret), "router")


async def test_secret_is_not_shown(address):
    assert address.secret not in repr(address)
    assert len(address.secret) >= 32


async def test_listener_is_on_the_address_it_was_told(address):
    with socket.socket() as other:
        other.settimeout(1)
        with pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", address.port))


async def test_nobody_at_the_address_is_told_at_once():
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        with pytest.raises(LinkRefusedError, match=r"(?i)no link to .*(refused|Errno 111)"):
            await tcp.connect(LinkAddress("127.0.0.1", port, "s"), "router")


FIRST_MESSAGES = [
    (b"\xc1 no message", "must be a Hello"),
    (encode(Ping()), "must be a Hello"),
    (encode(Hello("r", 999)), f"protocol {PROTOCOL_VERSION}, the router 999"),
]


@pytest.mark.parametrize(("frame", "reason"), FIRST_MESSAGES)
async def test_first_message_must_be_a_hello_of_this_protocol(address, frame, reason):
    greeting = b"squadron " + address.secret.encode()
    assert reason in await _tcp_answer(address, _framed(greeting) + _framed(frame))


async def test_replica_of_another_protocol_is_told_apart_from_one_that_is_not_there(address, monkeypatch):
    monkeypatch.setattr(tcp, "PROTOCOL_VERSION", 999)
    with pytest.raises(OtherProtocolError, match="this replica speaks link protocol 999"):
        await tcp.connect(address, "router")
    with pytest.raises(LinkRefusedError, match="unauthenticated") as caught:
        await tcp.connect(LinkAddress(address.host, address.port, "wrong"), "router")
    assert not isinstance(caught.value, OtherProtocolError)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


async def _tcp_answer(address: LinkAddress, data: bytes) -> str:
    """Send raw bytes, and return all that comes back until the other side hangs up."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    async with asyncio.timeout(8):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode(errors="replace")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95pickle",
        b"\xff" * 64,
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00" * 50,
    ],
)
async def test_bytes_of_a_stranger_get_a_short_refusal(address, data):
    answer = await _tcp_answer(address, data)
    assert len(answer) < 200
    assert "unauthenticated" in answer or "longer than" in answer


async def test_strangers_who_say_nothing_keep_no_router_out_and_do_not_pile_up(address, monkeypatch):
    monkeypatch.setattr(
        frames, "HELLO_TIMEOUT", 60.0
    )  # none is sent away for its silence, however busy this machine is
    monkeypatch.setattr(frames, "PROMPT", 0.0)
    strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(frames.MOST_UNKNOWN + 10)]
    link = await tcp.connect(address, "router")
    async with asyncio.timeout(30):
        assert b"too many others are" in await strangers[0][0].read()
    link.close()
    await link.wait_closed()
    for _, writer in strangers:
        writer.transport.abort()
    await asyncio.gather(*(writer.wait_closed() for _, writer in strangers), return_exceptions=True)


@pytest.mark.parametrize("turns", range(5))
async def test_who_comes_as_the_server_closes_leaves_nothing_behind(monkeypatch, turns):
    """At one of these moments asyncio has accepted it, and has yet to make its transport."""
    monkeypatch.setattr(frames, "HELLO_TIMEOUT", 0.05)
    server = tcp.LinkServer(silent)
    address = await server.start()
    with socket.create_connection((address.host, address.port)):
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        await asyncio.sleep(0.2)
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_goodbye_cut_short_is_a_lost_link():
    """A peer that dies in the middle of a frame has not said goodbye."""

    async def half_dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_framed(encode(WELCOME)) + b"\x80\x00\x00\x20closed: ")
        writer.close()

    server = await asyncio.start_server(half_dead, "127.0.0.1", 0)
    link = await tcp.connect(LinkAddress("127.0.0.1", server.sockets[0].getsockname()[1], "s"), "router")
    with pytest.raises(LinkClosedError) as caught:
        await asyncio.wait_for(link.receive(), 5)
    assert caught.value.code == LOST
    await link.wait_closed()
    server.close()


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_frames_may_arrive_in_any_pieces(size):
    """Bytes in ones, in threes, and several frames at once."""
    messages = [Rejected(i, "x", "y" * (i % 7)) for i in range(60)]
    data = b"".join(_framed(encode(message)) for message in (WELCOME, *messages))

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(dribble, "127.0.0.1", 0)
    link = await tcp.connect(LinkAddress("127.0.0.1", server.sockets[0].getsockname()[1], "s"), "router")
    assert [await asyncio.wait_for(link.receive(), 5) for _ in messages] == messages
    link.close()
    await link.wait_closed()
    server.close()


async def test_router_that_catches_up_gets_everything(open_link):
    """More than the kernel takes, less than the bound: nothing is lost, and reading goes on after a pause."""
    count = 1500

    async def burst(link: RouterLink) -> None:
        link.send(WELCOME)
        await link.receive()
        for i in range(count):
            link.send(Rejected(i, "x", "y" * 4000))
        await link.receive()

    link = await open_link(forgiving(burst))
    link.send(Ping())
    await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        assert [(await link.receive()).stream for _ in range(count)] == list(range(count))


async def test_killed_replica_is_noticed_at_once():
    """In another process. One that only falls silent is for the dispatcher to notice."""
    program = (
        "import asyncio, tests.cluster.wire.test_links as t\n"
        "async def main():\n"
        "    address = await t.tcp.LinkServer(t.silent).start()\n"
        "    print(address.port, address.secret, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        port, secret = (await asyncio.to_thread(process.stdout.readline)).split()
        link = await tcp.connect(LinkAddress("127.0.0.1", int(port), secret), "router")
        process.kill()
        with pytest.raises(LinkClosedError) as caught:
            await asyncio.wait_for(link.receive(), 0.5)
        assert caught.value.code == LOST
        await asyncio.wait_for(link.wait_closed(), 5)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_faulty_link_repeats_drops_holds_and_cuts():
    link = FaultyLink(await connect_local(forgiving(echo), "router"), FaultPlan(repeat=1.0))
    link.send(Abort(1))
    assert [(await link.receive()).stream for _ in range(4)] == [1, 1, 1, 1]
    link.hold()
    link.send(Abort(2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.receive(), 0.02)
    link.release()
    assert (await link.receive()).stream == 2
    link.cut()
    with pytest.raises(LinkClosedError):
        await link.receive()
    await link.wait_closed()
    deaf = FaultyLink(await connect_local(forgiving(echo), "router"), FaultPlan(drop_down=1.0))
    deaf.send(Abort(1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(deaf.receive(), 0.02)
    await deaf.wait_closed()
