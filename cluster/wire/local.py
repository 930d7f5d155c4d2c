"""The in-process link of tests and simulations: the same frames as on a socket, without the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.wire.link import (
    CLOSED,
    DAMAGED,
    In,
    Link,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    Out,
    ReplicaLink,
    RouterLink,
)
from cluster.wire.messages import (
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
from cluster.wire.pipe import FramePipe


class _LocalEnd(Link[Out, In]):
    """One end: sends into one pipe, receives from the other."""

    def __init__(
        self, sending: FramePipe, receiving: FramePipe, over: asyncio.Event, decode: Callable[[bytes], In]
    ) -> None:
        self._sending = sending
        self._receiving = receiving
        self._over = over
        self._decode = decode

    def send(self, message: Out) -> None:
        """Put the message's frame where the other end takes it."""
        try:
            self._sending.put(encode(message))
        except LinkClosedError as error:
            self.close(error.code, error.message)
            raise

    async def receive(self) -> In:
        """Take the next frame."""
        frame = await self._receiving.get()
        try:
            return self._decode(frame)
        except DamagedSubmitError:
            raise
        except DamagedMessageError as error:
            self.close(DAMAGED, str(error))
            raise LinkClosedError(DAMAGED, str(error)) from error

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """End both directions; the other end may still take what was sent to it."""
        self._sending.close(code, message)
        self._receiving.close(code, message, discard=True)
        self._over.set()

    @property
    def closed(self) -> bool:
        """Whether either end closed the link."""
        return self._over.is_set()

    async def wait_closed(self) -> None:
        """Wait for either end to close the link."""
        await self._over.wait()


class LocalReplicaLink(_LocalEnd[Up, Down], ReplicaLink):
    """The router's end of an in-process link. `served`: the task that serves the other end."""

    served: asyncio.Task[None]


class LocalRouterLink(_LocalEnd[Down, Up], RouterLink):
    """The replica's end of an in-process link."""


async def connect_local(
    serve: Callable[[RouterLink], Coroutine[Any, Any, None]], router_id: str, limits: LinkLimits | None = None
) -> LocalReplicaLink:
    """Open a link to whoever `serve`s in this process. Raises `LinkRefusedError`."""
    limits = limits or LinkLimits()
    up = FramePipe(limits.max_up_bytes, limits.max_message_bytes)
    down = FramePipe(limits.max_down_bytes, limits.max_message_bytes)
    over = asyncio.Event()
    router_link = LocalRouterLink(down, up, over, decode_up)
    router_link.hello = Hello(router_id)
    link = LocalReplicaLink(up, down, over, decode_down)
    link.served = asyncio.create_task(serve(router_link))
    try:
        welcome = await link.receive()
    except LinkClosedError as error:
        raise LinkRefusedError(f"the replica refused the link: {error}") from error
    if not isinstance(welcome, Welcome):
        raise LinkRefusedError(f"the replica's first message was a {type(welcome).__name__}, not a Welcome")
    link.welcome = welcome
    return link
