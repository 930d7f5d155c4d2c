"""A gateway: holds clients' connections, and has routers answer what comes through them.

A router that dies is replaced by another in the middle of an answer (`cluster.ingress.guard`). The gateway knows
nothing of models or tokens, and so has little to die of.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from cluster.answer_log import KEEPS
from cluster.ingress.bounded_http import BoundedHttp
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_pool import RouterPool
from cluster.ingress.router_side import until_lost
from engine.errors import ConfigError

HEALTHZ = "/-/healthz"  # as Serve's proxies answer it, for KubeRay and balancers
KEEP_ALIVE = 300  # seconds that a connection may wait for its next request
BACKLOG = 2048  # connections that the kernel holds until they are taken


class GatewayApp:
    """The exchanges of clients, and the health of the gateway itself (ASGI)."""

    def __init__(self, pool: RouterPool, guard: RouterLossGuard) -> None:
        self._pool = pool
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one exchange (ASGI)."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # refused before it is accepted
        elif scope["path"] == HEALTHZ:
            await self._health(send)
        elif KEEPS in scope:  # Serve has put a guard around its own server already, which also knows how clients read
            await self._pool(scope, until_lost(receive), send)
        else:
            await self._guard(scope, receive, send)

    async def _health(self, send: Send) -> None:
        status, body = (200, b"success") if self._pool.routers else (503, b"no router is known yet")
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


class HttpServer:
    """Takes HTTP connections for an app, on a port that other processes of this machine may share.

    Made and used on one event loop. Raises `ConfigError` when the address is taken by others. grace: seconds that
    running exchanges get at the end. max_connections: see `BoundedHttp`.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, grace: float, max_connections: int) -> None:
        config = uvicorn.Config(
            app,
            http=partial(BoundedHttp, max_connections=max_connections),  # type: ignore[arg-type]  # called alone
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(grace),
        )
        self._listener = _listener(host, port)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def ended(self) -> bool:
        """Whether it takes no connections any more."""
        return self._serving.done()

    async def stop(self) -> None:
        """Take no more connections, let exchanges finish, and end."""
        self._server.should_exit = True
        with suppress(asyncio.CancelledError):
            await self._serving


class _Server(uvicorn.Server):
    """Leaves signals to the process that it is a part of."""

    @override
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        message = f"port: cannot listen on {host} port {port} ({error.strerror}); choose another port or host"
        raise ConfigError(message, "port") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
