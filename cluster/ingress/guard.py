"""ASGI middleware around Ray Serve's proxy: an answer whose router dies ends in a typed error, never just like that.

Serve's proxy knows nothing of what it passes on. Where a router dies, a stream simply stops: a client of HTTP/1.1 may
notice that the body lacks its last chunk, others (HTTP/1.0, and all behind a reverse proxy that speaks it) believe it
whole; and who had no answer yet gets a bare 500. This sits in the proxy's process and says what happened.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable

from msgspec import json
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.client_id import is_client_id
from cluster.errors import ApiError
from cluster.log_lines import about
from cluster.logs import log_to_serve

# Ray Serve's variable for middleware around its proxy, and what it must say. Source: ray/serve/_private/constants.py.
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.ingress.guard:proxy_middlewares"
MARK = b"x-squadron-guard"  # on requests that came through the guard; a client's own is taken off
# Seconds in which a proxy that was just started may not know its apps yet, and says of any path that it is not there.
LEARNING = 10.0
_NUMBER = re.compile(rb'"sequence_number":(\d+)')  # the events of `/v1/responses` are numbered
log = logging.getLogger(__name__)


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve is to put around its proxy (called there, see `CALLBACK_VARIABLE`)."""
    log_to_serve()
    return [Middleware(RouterLossGuard)]


class RouterLossGuard:
    """Watches every HTTP answer that passes; one that its router did not complete is completed here.

    A stream of events gets a last event, the error `router_lost`; an exchange without an answer gets it as a 503.
    Any other body that was begun is left as it is: its server closes the connection short of the announced length.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._learns_until = clock() + LEARNING

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = [*(one for one in scope["headers"] if one[0] != MARK), (MARK, b"1")]
        exchange = _Exchange(receive, send, learning=self._clock() < self._learns_until)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("the proxy failed under a request")
        if not exchange.over:
            await exchange.lost(_request_id(scope))


class _Exchange:
    """How far one answer got. learning: a 404 of the proxy itself is no answer, for its apps may be there already."""

    def __init__(self, receive: Receive, send: Send, learning: bool) -> None:
        self.over = False  # answered to the end, or nobody is left to answer
        self._receive = receive
        self._send = send
        self._learning = learning
        self._unknown = False
        self._started = False
        self._streams_events = False
        self._last = b""

    async def receive(self) -> Message:
        message = await self._receive()
        self.over |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._unknown = self._learning and message["status"] == 404 and kind.startswith("text/plain")
            self._streams_events = kind.startswith("text/event-stream")
        if self._unknown:
            return
        self._started = True
        if message["type"] == "http.response.body":
            self._last = message.get("body") or self._last
            self.over |= not message.get("more_body", False)
        await self._send(message)

    async def lost(self, request_id: str | None) -> None:
        """Tell the client that its router is gone, or not there yet."""
        if self._unknown:
            await self._refuse(no_router(request_id))
            return
        extra = about({"client_id": request_id or ""})
        log.warning("request %s: its router was lost before its answer was complete", request_id, extra=extra)
        error = router_lost(request_id)
        if not self._started:
            await self._refuse(error)
        elif self._streams_events:
            await self._send({"type": "http.response.body", "body": self._last_event(error)})

    async def _refuse(self, error: ApiError) -> None:
        body = json.encode(error.body())
        headers: Iterable[tuple[str, str]] = (
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("retry-after", str(error.retry_after)),
            ("x-request-id", error.request_id or ""),
        )
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    def _last_event(self, error: ApiError) -> bytes:
        """Return the event in the form that the stream's route gives its own errors."""
        body = error.body()
        numbers = _NUMBER.findall(self._last)
        if not numbers:
            return b"data: " + json.encode(body) + b"\n\n"
        told = {"code": error.code, "message": error.message, "param": error.param}
        event = {"type": "error", "sequence_number": int(numbers[-1]) + 1, **told, **body}
        return b"event: error\ndata: " + json.encode(event) + b"\n\n"


def router_lost(request_id: str | None) -> ApiError:
    """Return the error of an answer whose router died; the request can be sent again as it is."""
    message = "the router was lost before the answer was complete; send the request again"
    return ApiError("router_lost", message, request_id=request_id)


def no_router(request_id: str | None) -> ApiError:
    """Return the error of a request that came before this proxy knew of any router."""
    message = "the proxy has only just started and knows no router yet; send the request again"
    return ApiError("no_router", message, request_id=request_id)


def _request_id(scope: Scope) -> str | None:
    """The id that the answer shows as `x-request-id`: Serve's proxy puts one on every request that brings none.

    None where a client's own is unfit for a line of a log.
    """
    name = Headers(scope=scope).get("x-request-id", "")
    return name if is_client_id(name) else None
