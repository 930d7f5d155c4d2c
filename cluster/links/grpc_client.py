"""The router's end of a gRPC link: one bidirectional stream with our msgpack frames as raw bytes.

The secret in the metadata was made for this life of the replica. HTTP/2 keepalive notices a peer that vanished
without a word. A link that the replica ends for a reason has it in the stream's status: ABORTED, "code: message".
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cluster.link import (
    CLOSED,
    DAMAGED,
    LOST,
    LinkAddress,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    ReplicaLink,
)
from cluster.links.grpc_wire import HELLO_TIMEOUT, LINGER, METHOD, SECRET_KEY, SERVICE, channel_options
from cluster.links.pipe import FramePipe
from cluster.messages import DamagedMessageError, Down, Hello, Up, Welcome, decode_down, encode


class GrpcReplicaLink(ReplicaLink):
    """The router's end; made by `connect`."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, welcome: Welcome, limits: LinkLimits) -> None:
        self.welcome = welcome
        self._channel = channel
        self._call = call
        self._outbox = FramePipe(limits.max_up_bytes, limits.max_message_bytes)
        self._over = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def send(self, message: Up) -> None:
        """Queue the message for the writer."""
        try:
            self._outbox.put(encode(message))
        except LinkClosedError as error:
            self.close(error.code, error.message)
            raise

    async def receive(self) -> Down:
        """Read the next message off the stream."""
        try:
            frame = None if self.closed else await self._call.read()
        except grpc.aio.AioRpcError:
            frame = None
        except asyncio.CancelledError:
            # gRPC gives this to the reader of a call that was cancelled, as well as to a task that is.
            if not self.closed or _task_cancelled():
                raise
            frame = None
        if not isinstance(frame, bytes):
            raise await self._end_reason()
        try:
            return decode_down(frame)
        except DamagedMessageError as error:
            self.close(DAMAGED, str(error))
            raise LinkClosedError(DAMAGED, str(error)) from error

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Stop sending; the writer ends the stream after what was queued."""
        if not self.closed:
            # A writer that a stalled peer holds up must end too.
            asyncio.get_running_loop().call_later(2 * LINGER, self._call.cancel)
        self._outbox.close(code, message)

    @property
    def closed(self) -> bool:
        """Whether this end closed the link or saw it end."""
        return self._outbox.ended is not None

    async def wait_closed(self) -> None:
        """Wait until the channel is closed."""
        await self._over.wait()

    async def _end_reason(self) -> LinkClosedError:
        if self._outbox.ended is None:
            error = _reason(await self._call.code(), await self._call.details())
            self.close(error.code, error.message)
        ended = self._outbox.ended
        return LinkClosedError(ended.code, ended.message) if ended else LinkClosedError(LOST)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except LinkClosedError:
            await self._half_close()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.close(LOST, f"the stream to replica {self.replica_id} broke: {type(error).__name__}")
        finally:
            self._call.cancel()
            await self._channel.close()
            self._over.set()

    async def _half_close(self) -> None:
        # Cancelling at once would drop frames that HTTP/2 has not sent yet.
        if not self._call.done():
            await self._call.done_writing()
            await asyncio.wait([asyncio.ensure_future(self._call.code())], timeout=LINGER)


async def connect(address: LinkAddress, router_id: str, limits: LinkLimits | None = None) -> GrpcReplicaLink:
    """Open a link to the replica at `address`. Raises `LinkRefusedError` within `HELLO_TIMEOUT` seconds."""
    limits = limits or LinkLimits()
    channel = grpc.aio.insecure_channel(f"{address.host}:{address.port}", options=channel_options(limits))
    try:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((SECRET_KEY, address.secret),))
        welcome = await asyncio.wait_for(_greet(call, router_id), HELLO_TIMEOUT)
    except BaseException as error:
        await channel.close()
        if isinstance(error, TimeoutError | grpc.aio.AioRpcError | DamagedMessageError):
            raise LinkRefusedError(f"no link to {address.host}:{address.port}: {_describe(error)}") from error
        raise
    return GrpcReplicaLink(channel, call, welcome, limits)


async def _greet(call: Any, router_id: str) -> Welcome:
    await call.wait_for_connection()  # a write to a stream that was refused would hide the reason
    await call.write(encode(Hello(router_id)))
    frame = await call.read()
    if not isinstance(frame, bytes):
        reason = _reason(await call.code(), await call.details())
        raise LinkRefusedError(f"the replica refused the link: {reason}")
    welcome = decode_down(frame)
    if not isinstance(welcome, Welcome):
        raise LinkRefusedError(f"the replica's first message was a {type(welcome).__name__}, not a Welcome")
    return welcome


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _reason(status: Any, details: str | None) -> LinkClosedError:
    """Turn the status of a finished stream into why it ended."""
    if status is grpc.StatusCode.OK:
        return LinkClosedError(CLOSED, "the replica ended the stream")
    if status is grpc.StatusCode.ABORTED and details and ": " in details:
        code, message = details.split(": ", 1)
        return LinkClosedError(code, message)
    return LinkClosedError(LOST, f"{status.name if status else 'no status'}: {details or ''}")


def _task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
