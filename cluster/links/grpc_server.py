"""The replica's end of a gRPC link, and the server that makes one for each router that opens a stream.

The server takes a secret made for this life of the replica; a stranger on the port gets UNAUTHENTICATED.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cluster.link import CLOSED, DAMAGED, LOST, LinkAddress, LinkClosedError, LinkLimits, RouterLink
from cluster.links.grpc_wire import HELLO_TIMEOUT, LINGER, METHOD, SECRET_KEY, SERVICE, channel_options
from cluster.links.pipe import FramePipe
from cluster.messages import PROTOCOL_VERSION, DamagedMessageError, Down, Hello, Up, decode_up, encode


class GrpcRouterLink(RouterLink):
    """The replica's end; made by `LinkServer` for each router that opens a stream."""

    def __init__(self, context: Any, hello: Hello, limits: LinkLimits) -> None:
        self.hello = hello
        self._context = context
        self._outbox = FramePipe(limits.max_down_bytes, limits.max_message_bytes)
        self._inbox = FramePipe(limits.max_up_bytes, limits.max_message_bytes)
        self._over = asyncio.Event()

    def send(self, message: Down) -> None:
        """Queue the message for the writer."""
        try:
            self._outbox.put(encode(message))
        except LinkClosedError as error:
            self.close(error.code, error.message)
            raise

    async def receive(self) -> Up:
        """Take the next message that was read."""
        frame = await self._inbox.get()
        try:
            return decode_up(frame)
        except DamagedMessageError as error:
            self.close(DAMAGED, str(error))
            raise LinkClosedError(DAMAGED, str(error)) from error

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Stop both directions; the server ends the stream after what was queued."""
        self._outbox.close(code, message)
        self._inbox.close(code, message, discard=True)
        self._over.set()

    @property
    def closed(self) -> bool:
        """Whether this end closed the link or saw it end."""
        return self._outbox.ended is not None

    async def wait_closed(self) -> None:
        """Wait until the stream is over for this end."""
        await self._over.wait()

    async def run(self, serve: Callable[[RouterLink], Awaitable[None]]) -> None:
        """Move frames while `serve` runs, then end the stream with the reason. Called by the server, once."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await serve(self)
        finally:
            self.close()
            reader.cancel()
            await asyncio.wait([writer], timeout=LINGER)
            writer.cancel()
            await asyncio.wait([reader, writer])
        ended = self._outbox.ended
        if ended is not None and ended.code != CLOSED:
            await self._context.abort(grpc.StatusCode.ABORTED, f"{ended.code}: {ended.message}")

    async def _read(self) -> None:
        try:
            while isinstance(frame := await self._context.read(), bytes):
                self._inbox.put(frame)
        except LinkClosedError as error:
            self.close(error.code, error.message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.close(LOST, f"the stream of router {self.router_id} broke: {type(error).__name__}")
        else:
            self.close(CLOSED, "the router ended the stream")

    async def _write(self) -> None:
        try:
            while True:
                await self._context.write(await self._outbox.get())
        except LinkClosedError:
            return
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.close(LOST, f"the stream of router {self.router_id} broke: {type(error).__name__}")


class LinkServer:
    """Listens for routers; `serve(link)` is awaited once per link and sends the Welcome first."""

    def __init__(self, serve: Callable[[RouterLink], Awaitable[None]], limits: LinkLimits | None = None) -> None:
        self._serve = serve
        self._limits = limits or LinkLimits()
        self._secret = secrets.token_urlsafe(32)
        self._server = grpc.aio.server(options=channel_options(self._limits))
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> LinkAddress:
        """Listen and return the address that routers need; port 0 lets the system choose."""
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return LinkAddress(host, bound, self._secret)

    async def close(self, grace: float = LINGER) -> None:
        """Stop listening and end all streams, at the latest after `grace` seconds."""
        await self._server.stop(grace)

    async def _connect(self, _requests: Any, context: Any) -> None:
        sent = dict(context.invocation_metadata() or ()).get(SECRET_KEY, "")
        if not hmac.compare_digest(str(sent).encode(), self._secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing secret")
        await context.send_initial_metadata(())  # the router writes nothing before it was let in
        hello = await _first_message(context)
        if not isinstance(hello, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello, within 5 s")
        elif hello.protocol != PROTOCOL_VERSION:
            message = f"this replica speaks link protocol {PROTOCOL_VERSION}, the router {hello.protocol}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        else:
            await GrpcRouterLink(context, hello, self._limits).run(self._serve)


async def _first_message(context: Any) -> Up | None:
    try:
        frame = await asyncio.wait_for(context.read(), HELLO_TIMEOUT)
        return decode_up(frame) if isinstance(frame, bytes) else None
    except (TimeoutError, DamagedMessageError):
        return None
