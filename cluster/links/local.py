"""The in-process link of tests and simulations: the same frames as on a socket, without the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.link import CLOSED, DAMAGED, In, Link, LinkClosedError, LinkLimits, Out, ReplicaLink, RouterLink
from cluster.links.pipe import FramePipe
from cluster.messages import DamagedMessageError, Down, Hello, Up, Welcome, decode_down, decode_up, encode


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
    """The router's end of an in-process link."""


class LocalRouterLink(_LocalEnd[Down, Up], RouterLink):
    """The replica's end of an in-process link."""


def local_link(
    router_id: str, welcome: Welcome, limits: LinkLimits | None = None
) -> tuple[LocalReplicaLink, LocalRouterLink]:
    """Return the two ends of a new link: the router's and the replica's."""
    limits = limits or LinkLimits()
    up = FramePipe(limits.max_up_bytes, limits.max_message_bytes)
    down = FramePipe(limits.max_down_bytes, limits.max_message_bytes)
    over = asyncio.Event()
    replica_link = LocalReplicaLink(up, down, over, decode_down)
    replica_link.welcome = welcome
    router_link = LocalRouterLink(down, up, over, decode_up)
    router_link.hello = Hello(router_id)
    return replica_link, router_link
