"""Links: frames in order, bounded buffers, typed ends, and no stranger on the port."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from cluster.link import (
    DAMAGED,
    ENGINE_DEAD,
    LOST,
    SLOW_CONSUMER,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    MessageTooLargeError,
    ReplicaLink,
    RouterLink,
)
from cluster.links.faulty import FaultPlan, FaultyLink
from cluster.links.grpc_client import connect
from cluster.links.grpc_server import LinkServer
from cluster.links.grpc_wire import METHOD, SERVICE, LinkAddress
from cluster.links.local import connect_local
from cluster.messages import Abort, Draining, Hello, Ping, Rejected, Welcome, encode

WELCOME = Welcome("a", 5, "fake", 100, 61, 4, 9)
Serve = Callable[[RouterLink], Awaitable[None]]
Open = Callable[..., Awaitable[ReplicaLink]]


async def silent(link: RouterLink) -> None:
    """A replica that says no more than its welcome."""
    link.send(WELCOME)
    await link.wait_closed()


@pytest.fixture(params=["local", "grpc"])
async def open_link(request) -> AsyncIterator[Open]:
    """Open a link to a replica that serves as told."""
    servers: list[LinkServer] = []
    links: list[ReplicaLink] = []

    async def opened(serve: Serve, limits: LinkLimits | None = None, router: str = "router") -> ReplicaLink:
        if request.param == "local":
            links.append(await connect_local(serve, router, limits))
        else:
            servers.append(LinkServer(serve, limits))
            links.append(await connect(await servers[-1].start(), router, limits))
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
    server = LinkServer(forgiving(echo))
    yield await server.start()
    await server.close()


async def test_stranger_is_unauthenticated(address):
    for secret in ("", "wrong", address.secret[:-1]):
        with pytest.raises(LinkRefusedError, match="UNAUTHENTICATED"):
            await connect(LinkAddress(address.host, address.port, secret), "router")


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
        with pytest.raises(LinkRefusedError, match="UNAVAILABLE"):
            await connect(LinkAddress("127.0.0.1", port, "s"), "router")


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (b"\xc1 no message", grpc.StatusCode.INVALID_ARGUMENT),
        (encode(Ping()), grpc.StatusCode.INVALID_ARGUMENT),
        (encode(Hello("r", 999)), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_first_message_must_be_a_hello_of_this_protocol(address, frame, status):
    async with grpc.aio.insecure_channel(f"{address.host}:{address.port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=(("squadron-secret", address.secret),))
        await call.write(frame)
        assert await call.code() is status


@pytest.mark.parametrize(("kill", "deadline"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 5)])
async def test_replica_that_dies_or_hangs_under_the_link_is_noticed(kill, deadline):
    """In another process: a killed one at once, a stopped one by the keepalive."""
    limits = LinkLimits(keepalive=0.1, keepalive_timeout=0.6)
    program = (
        "import asyncio, tests.unit.test_links as t\n"
        "async def main():\n"
        "    address = await t.LinkServer(t.silent).start()\n"
        "    print(address.port, address.secret, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        port, secret = (await asyncio.to_thread(process.stdout.readline)).split()
        link = await connect(LinkAddress("127.0.0.1", int(port), secret), "router", limits)
        process.send_signal(kill)
        with pytest.raises(LinkClosedError) as caught:
            await asyncio.wait_for(link.receive(), deadline)
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
