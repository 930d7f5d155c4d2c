"""The routers that a gateway knows: which of them gets an exchange, and whether each still lives."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from cluster.answer_log import CONTINUES
from cluster.ingress.guard import no_router, refuse
from cluster.ingress.router_link import SILENCE, RouterConnection
from cluster.wire.link import LinkAddress

MOST_IDLE = 256  # connections that wait for their next exchange, to each router
log = logging.getLogger(__name__)


class KnownRouter:
    """One router. leaving: it is to stop, and gets nothing new. gone: its connections are broken. load: exchanges."""

    def __init__(self, router_id: str, address: LinkAddress) -> None:
        self.router_id = router_id
        self.leaving = False
        self.gone = False
        self.load = 0
        self._left = asyncio.Event()  # set once it is to stop and has no exchange any more
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._connections: deque[RouterConnection] = deque()

    @property
    def silent(self) -> bool:
        """Whether it has said nothing for a while; it may be stopped, or cut off."""
        return self._loop.time() - self._heard > SILENCE

    def leave(self) -> None:
        """Give it nothing new from now on."""
        self.leaving = True
        if not self.load:
            self._left.set()

    async def left(self) -> None:
        """Return once it is to stop and has answered what it was asked."""
        await self._left.wait()

    async def watch(self, gateway_id: str) -> None:
        """Listen to it until it is gone. Raises `OSError` where it cannot be reached."""
        connection = await RouterConnection.open(self._address)
        try:
            await connection.watch(gateway_id, self._hear)
        finally:
            self.gone = True
            connection.close()
            for one in self._connections:
                one.close()

    def _hear(self, leaves: bool) -> None:
        self._heard = self._loop.time()
        if leaves:
            self.leave()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it answer an exchange; returns when it has, or is lost (ASGI)."""
        try:
            async with self._connection() as connection:
                await connection.exchange(scope, receive, send)
        except OSError as error:
            log.warning("router %s cannot be reached: %s", self.router_id, error)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[RouterConnection, None]:
        """Lend a connection for one exchange. Raises `OSError`."""
        self.load += 1
        connection = None
        try:
            connection = self._idle_connection() or await RouterConnection.open(self._address)
            yield connection
        finally:
            self.load -= 1
            if self.leaving and not self.load:
                self._left.set()
            if connection is not None and not connection.closed:
                if self.gone or len(self._connections) >= MOST_IDLE:
                    connection.close()
                else:
                    self._connections.append(connection)

    def _idle_connection(self) -> RouterConnection | None:
        while self._connections:
            connection = self._connections.pop()  # the one used last is the likeliest to be open
            if not connection.closed:
                return connection
        return None


class RouterPool:
    """ASGI application of a gateway: has one of the routers answer each exchange.

    patience: seconds that an exchange waits where there is no router.
    """

    def __init__(self, gateway_id: str, patience: float) -> None:
        self._gateway_id = gateway_id
        self._patience = patience
        self._routers: dict[str, KnownRouter] = {}
        self._came = asyncio.Event()

    @property
    def routers(self) -> list[KnownRouter]:
        """All that are known."""
        return list(self._routers.values())

    async def hold(self, router: KnownRouter) -> None:
        """Know a router until it is gone. Raises `OSError` where it cannot be reached."""
        watching = asyncio.ensure_future(router.watch(self._gateway_id))
        self._routers[router.router_id] = router
        self._tell()
        try:
            await watching
        finally:
            watching.cancel()
            del self._routers[router.router_id]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an exchange on; returns when a router has answered it, or was lost. Waits while there is none."""
        try:
            async with asyncio.timeout(self._patience):
                router = await self._chosen()
        except TimeoutError:
            if CONTINUES in scope:
                return
            await refuse(no_router(Headers(scope=scope).get("x-request-id")), send)
            return
        await router(scope, receive, send)

    async def _chosen(self) -> KnownRouter:
        """Return the router with the fewest exchanges. One that is silent, or to stop, is a last resort."""
        while not (there := [one for one in self._routers.values() if not one.gone]):
            self._came.clear()
            await self._came.wait()
        chosen = min(there, key=lambda one: (one.silent, one.leaving, one.load))
        # The one asked last comes last among equals.
        self._routers[chosen.router_id] = self._routers.pop(chosen.router_id)
        return chosen

    def _tell(self) -> None:
        self._came.set()
