"""The routers that a gateway knows: which of them gets an exchange, and whether each still lives."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from cluster.answer_log import CONTINUES, LEASE, NO_ROUTER, TICK
from cluster.ingress.attempt import LEFT
from cluster.ingress.exchange import DEADLINE
from cluster.ingress.guard import no_router, refuse
from cluster.ingress.router_link import SILENCE, RouterConnection
from cluster.wire.frames import HELLO_TIMEOUT
from cluster.wire.link import LinkAddress

MOST_IDLE = 256  # connections that wait for their next exchange, to each router
MOST_OPENING = 16  # connections that are being made, to each
log = logging.getLogger(__name__)


class KnownRouter:
    """One router, as an ASGI application. leaving: it is to stop, and gets nothing new. load: its exchanges."""

    def __init__(self, router_id: str, address: LinkAddress) -> None:
        self.router_id = router_id
        self.leaving = False
        self.load = 0
        self._dismissed = False
        self._left = asyncio.Event()  # set once it is dismissed and has no exchange any more
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._avoided_until = self._heard
        self._idle: deque[RouterConnection] = deque()
        self._lent: set[RouterConnection] = set()
        self._opening = asyncio.Semaphore(MOST_OPENING)

    @property
    def silent(self) -> bool:
        """Whether it has said nothing for a while, or an exchange has left it; it may be stopped, or cut off."""
        now = self._loop.time()
        return now - self._heard > SILENCE or now < self._avoided_until

    def dismiss(self) -> None:
        """Give it nothing new, and do without it once it has answered what it was asked."""
        self.leaving = self._dismissed = True
        if not self.load:
            self._left.set()

    async def left(self) -> None:
        """Return once it is dismissed and has answered what it was asked."""
        await self._left.wait()

    async def watch(self, gateway_id: str, alive: Callable[[], None]) -> None:
        """Listen to it until it is gone, or silent at `LEASE` looks in a row; `alive` is called when it speaks.

        Looks are counted: a gateway that stood still itself leaves nobody. Raises `OSError` if it is not there.
        """
        quiet = 0

        def hear(leaves: bool) -> None:
            nonlocal quiet
            self._heard, quiet = self._loop.time(), 0
            self.leaving |= leaves
            alive()

        connection = await RouterConnection.open(self._address)
        listening = asyncio.ensure_future(connection.watch(gateway_id, hear))
        try:
            while not (await asyncio.wait((listening,), timeout=TICK))[0]:
                quiet += 1
                if quiet >= LEASE:
                    log.warning("router %s says nothing: it is left", self.router_id)
                    return
            listening.result()
        finally:
            listening.cancel()
            connection.close()

    def close(self) -> None:
        """Break all connections: whoever waits for it asks another one, once its client has read what had come."""
        for one in (*self._idle, *self._lent):
            one.close(discard=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it answer an exchange; returns when it has, or is lost (ASGI). Who leaves it is not sent back soon."""
        try:
            async with self._connection() as connection:
                await connection.exchange(scope, receive, send)
        except asyncio.CancelledError as cancelled:
            if LEFT in cancelled.args:
                self._avoid()
            raise
        except OSError as error:
            self._avoid()
            log.warning("router %s cannot be reached: %s", self.router_id, error)

    def _avoid(self) -> None:
        self._avoided_until = self._loop.time() + LEASE * TICK

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[RouterConnection, None]:
        """Lend a connection for one exchange. Raises `OSError`."""
        self.load += 1
        connection = None
        try:
            connection = self._open_one() or await self._opened()
            self._lent.add(connection)
            yield connection
        finally:
            self.load -= 1
            if self._dismissed and not self.load:
                self._left.set()
            if connection is not None:
                self._take_back(connection)

    def _open_one(self) -> RouterConnection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last is the likeliest to be open
            if not connection.closed:
                return connection
        return None

    async def _opened(self) -> RouterConnection:
        async with asyncio.timeout(HELLO_TIMEOUT), self._opening:
            return await RouterConnection.open(self._address)

    def _take_back(self, connection: RouterConnection) -> None:
        self._lent.discard(connection)
        if len(self._idle) >= MOST_IDLE:
            connection.close()
        elif not connection.closed:
            self._idle.append(connection)


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
        """Know a router from its first word until it is gone. Raises `OSError` where it cannot be reached."""

        def alive() -> None:
            if router.router_id not in self._routers:
                self._routers[router.router_id] = router
                self._came.set()

        try:
            await router.watch(self._gateway_id, alive)
        finally:
            self._routers.pop(router.router_id, None)
            router.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an exchange on; returns when a router has answered it, or was lost. Waits while there is none."""
        until, deadline = asyncio.get_running_loop().time() + self._patience, scope.get(DEADLINE)
        is_short = deadline is not None and deadline < until
        try:
            async with asyncio.timeout_at(deadline if is_short else until):
                router = await self._chosen(send)
        except TimeoutError:
            if CONTINUES in scope or is_short:
                return
            await refuse(no_router(Headers(scope=scope).get("x-request-id")), send)
            return
        await router(scope, receive, send)

    async def _chosen(self, send: Send) -> KnownRouter:
        """Return the router with the fewest exchanges. One that is silent, or to stop, is a last resort."""
        while not self._routers:
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), TICK)
            await send({"type": NO_ROUTER})
        chosen = min(self._routers.values(), key=lambda one: (one.silent, one.leaving, one.load))
        # The one asked last comes last among equals.
        self._routers[chosen.router_id] = self._routers.pop(chosen.router_id)
        return chosen
