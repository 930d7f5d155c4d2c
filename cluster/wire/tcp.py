"""The real link: our msgpack frames over one TCP connection (`cluster.wire.frames`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cluster.wire.codec import DamagedMessageError, decode_up, encode
from cluster.wire.frames import HELLO_TIMEOUT, FrameServer, FrameStream, open_stream
from cluster.wire.link import (
    OTHER_PROTOCOL,
    FrameReplicaLink,
    FrameRouterLink,
    LinkAddress,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    OtherProtocolError,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.parts import PROTOCOL_VERSION
from cluster.wire.router_messages import Hello

Serve = Callable[[RouterLink], Awaitable[None]]


async def connect(address: LinkAddress, router_id: str, limits: LinkLimits | None = None) -> ReplicaLink:
    """Open a link to the replica at `address`.

    Raises `LinkRefusedError` within `HELLO_TIMEOUT` seconds; `OtherProtocolError` where trying again is of no use.
    """
    stream: FrameStream | None = None
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            stream = await open_stream(address, limits or LinkLimits())
            stream.send(encode(Hello(router_id)))
            return await FrameReplicaLink.welcomed(stream)
    except BaseException as error:
        if stream is not None:
            stream.close()
        if isinstance(error, LinkClosedError) and error.code == OTHER_PROTOCOL:
            raise OtherProtocolError(error.message) from error
        if not isinstance(error, OSError | LinkClosedError):  # TimeoutError is an OSError
            raise
        reason = str(error) or "no answer in time"
        raise LinkRefusedError(f"no link to {address.host}:{address.port}: {reason}") from error


class LinkServer(FrameServer):
    """Listens for routers; `serve(link)` is awaited once per link and sends the Welcome first."""

    def __init__(self, serve: Serve, limits: LinkLimits | None = None) -> None:
        super().__init__(self._greeted, limits, "replica")
        self._serve_link = serve

    async def _greeted(self, stream: FrameStream) -> None:
        hello = await asyncio.wait_for(_hello(stream), HELLO_TIMEOUT)
        await self._serve_link(FrameRouterLink(stream, hello))


async def _hello(stream: FrameStream) -> Hello:
    try:
        hello = decode_up(await stream.receive())
    except DamagedMessageError as error:
        raise LinkRefusedError(f"the first message must be a Hello: {error}") from error
    if not isinstance(hello, Hello):
        raise LinkRefusedError("the first message must be a Hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise OtherProtocolError(f"this replica speaks link protocol {PROTOCOL_VERSION}, the router {hello.protocol}")
    return hello
