"""Tells whether requests reach this router through an ingress that would tell clients of its death, and of theirs."""

from __future__ import annotations

import logging

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.ingress.guard import CALLBACK, CALLBACK_VARIABLE, MARK

UNGUARDED = (
    "requests come through a proxy of Ray Serve that is not guarded: a client that trusts the end of a body may take "
    "a stream whose router died for whole. Start Ray, on every node, with "
    f"{CALLBACK_VARIABLE}={CALLBACK}"
)
log = logging.getLogger(__name__)


class IngressCheck:
    """ASGI middleware of a router. `guarded`: whether the last request came through the guard; None before any."""

    def __init__(self, app: ASGIApp) -> None:
        self.guarded: bool | None = None
        self._app = app
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at one request and pass it on (ASGI)."""
        if scope["type"] == "http":
            self.guarded = any(name == MARK for name, _ in scope["headers"])
            if not self.guarded and not self._warned:
                self._warned = True
                log.warning(UNGUARDED)
        await self._app(scope, until_lost(receive), send)


def until_lost(receive: Receive) -> Receive:
    """Return `receive` that tells of a disconnect where Ray cannot fetch more from the proxy: nobody is there.

    Serve raises what its call to the proxy raised, when that has died, or has cancelled a request on whose client it
    has given up while its body was still on its way.
    """
    lost = False

    async def receive_or_disconnect() -> Message:
        nonlocal lost
        if not lost:
            try:
                return await receive()
            except RayError as error:
                lost = True
                log.info("a request's client is gone: %s", type(error).__name__)
        return {"type": "http.disconnect"}

    return receive_or_disconnect
