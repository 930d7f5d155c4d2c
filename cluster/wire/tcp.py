"""The real link: our msgpack frames over one TCP connection, on the event loop's own thread.

The server takes a secret made for this life of the replica, in a first frame that is short and due within seconds; a
stranger on the port is told `unauthenticated` and nothing else. A peer that vanishes without a word is noticed by who
uses the link: both sides speak at least every second and give a silent peer up.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from cluster.wire.framing import FrameStream
from cluster.wire.link import (
    CLOSED,
    DAMAGED,
    OTHER_PROTOCOL,
    REFUSED,
    In,
    Link,
    LinkAddress,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    OtherProtocolError,
    Out,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.messages import (
    PROTOCOL_VERSION,
    DamagedMessageError,
    DamagedSubmitError,
    Down,
    Hello,
    Up,
    Welcome,
    decode_down,
    decode_up,
    encode,
)

logger = logging.getLogger(__name__)

GREETING = b"squadron "  # followed by the secret
GREETING_BYTES = 1024  # longest frame of somebody who is not known yet
MOST_UNKNOWN = 64  # connections of nobody who is known yet; beyond that, who came first has had its time
HELLO_TIMEOUT = 5.0  # seconds for the first words of either side

Serve = Callable[[RouterLink], Awaitable[None]]


class _TcpEnd(Link[Out, In]):
    """One end of a connection."""

    def __init__(self, stream: FrameStream, decode: Callable[[bytes], In]) -> None:
        self._stream = stream
        self._decode = decode

    def send(self, message: Out) -> None:
        """Hand the message's frame to the connection."""
        self._stream.send(encode(message))

    async def receive(self) -> In:
        """Take the next frame."""
        frame = await self._stream.receive()
        try:
            return self._decode(frame)
        except DamagedSubmitError:
            raise
        except DamagedMessageError as error:
            self.close(DAMAGED, str(error))
            raise LinkClosedError(DAMAGED, str(error)) from error

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Say goodbye with the reason, after what was sent."""
        self._stream.close(code, message)

    @property
    def closed(self) -> bool:
        """Whether this end said or heard goodbye, or the connection broke."""
        return self._stream.ended is not None

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await self._stream.over.wait()


class TcpReplicaLink(_TcpEnd[Up, Down], ReplicaLink):
    """The router's end; made by `connect`."""


class TcpRouterLink(_TcpEnd[Down, Up], RouterLink):
    """The replica's end; made by `LinkServer` for each router."""


async def connect(address: LinkAddress, router_id: str, limits: LinkLimits | None = None) -> TcpReplicaLink:
    """Open a link to the replica at `address`.

    Raises `LinkRefusedError` within `HELLO_TIMEOUT` seconds; `OtherProtocolError` where trying again is of no use.
    """
    limits = limits or LinkLimits()
    stream = FrameStream(limits.max_up_bytes, limits.max_message_bytes, limits.max_message_bytes)
    try:
        async with asyncio.timeout(HELLO_TIMEOUT):
            await asyncio.get_running_loop().create_connection(lambda: stream, address.host, address.port)
            stream.send(GREETING + address.secret.encode())
            stream.send(encode(Hello(router_id)))
            link = TcpReplicaLink(stream, decode_down)
            welcome = await link.receive()
    except (OSError, LinkClosedError) as error:  # TimeoutError is an OSError
        stream.close()
        if isinstance(error, LinkClosedError) and error.code == OTHER_PROTOCOL:
            raise OtherProtocolError(error.message) from error
        reason = str(error) or "no answer in time"
        raise LinkRefusedError(f"no link to {address.host}:{address.port}: {reason}") from error
    except BaseException:
        stream.close()
        raise
    if not isinstance(welcome, Welcome):
        stream.close(DAMAGED, "the first message must be a Welcome")
        raise LinkRefusedError(f"the replica's first message was a {type(welcome).__name__}, not a Welcome")
    link.welcome = welcome
    return link


class LinkServer:
    """Listens for routers; `serve(link)` is awaited once per link and sends the Welcome first."""

    def __init__(self, serve: Serve, limits: LinkLimits | None = None) -> None:
        self._serve = serve
        self._limits = limits or LinkLimits()
        self._secret = secrets.token_urlsafe(32)
        self._greeting = GREETING + self._secret.encode()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], FrameStream] = {}
        self._unknown: OrderedDict[FrameStream, None] = OrderedDict()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> LinkAddress:
        """Listen and return the address that routers need; port 0 lets the system choose."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        return LinkAddress(host, self._server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for stream in self._connections.values():
            stream.close(CLOSED, "the replica stops")
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self) -> FrameStream:
        limits = self._limits
        stream = FrameStream(limits.max_down_bytes, limits.max_message_bytes, GREETING_BYTES)
        task = asyncio.get_running_loop().create_task(self._run(stream))
        self._connections[task] = stream
        self._unknown[stream] = None
        if len(self._unknown) > MOST_UNKNOWN:
            self._unknown.popitem(last=False)[0].close(REFUSED, "unauthenticated, and too many others are")
        task.add_done_callback(self._connections.pop)
        return stream

    async def _run(self, stream: FrameStream) -> None:
        try:
            hello = await asyncio.wait_for(self._hello(stream), HELLO_TIMEOUT)
            self._unknown.pop(stream, None)
            link = TcpRouterLink(stream, decode_up)
            link.hello = hello
            await self._serve(link)
        except TimeoutError:
            stream.close(REFUSED, f"the first message must come within {HELLO_TIMEOUT:g} s")
        except LinkRefusedError as error:
            stream.close(OTHER_PROTOCOL if isinstance(error, OtherProtocolError) else REFUSED, str(error))
        except LinkClosedError:
            return  # gone before it said who it is, or while it was served
        except Exception:
            logger.exception("a link could not be served")
            stream.close(DAMAGED, "the link could not be served")
        finally:
            self._unknown.pop(stream, None)
            stream.close(CLOSED, "the replica serves the link no more")
            await stream.over.wait()

    async def _hello(self, stream: FrameStream) -> Hello:
        if not hmac.compare_digest(await stream.receive(), self._greeting):
            raise LinkRefusedError("unauthenticated: wrong or missing secret")
        stream.max_received = self._limits.max_message_bytes
        try:
            hello = decode_up(await stream.receive())
        except DamagedMessageError as error:
            raise LinkRefusedError(f"the first message must be a Hello: {error}") from error
        if not isinstance(hello, Hello):
            raise LinkRefusedError("the first message must be a Hello")
        if hello.protocol != PROTOCOL_VERSION:
            raise OtherProtocolError(
                f"this replica speaks link protocol {PROTOCOL_VERSION}, the router {hello.protocol}"
            )
        return hello
