"""ASGI middleware around Ray Serve's proxy: it reports a router's death to clients, and slow clients to routers.

Serve's proxy knows nothing of what it passes on. Where a router dies, a stream simply stops: a client of HTTP/1.1 may
notice that the body lacks its last chunk, others (HTTP/1.0, and all behind a reverse proxy that speaks it) believe it
whole; and who had no answer yet gets a bare 500. This sits in the proxy's process and says what happened.

Serve's proxy answers two paths itself, without a key. `/-/healthz` says one word and stays, for KubeRay and balancers
look there; `/-/routes`, the names of all apps and where they are, is answered here as a path that is not there.

And Serve queues without bound what a client does not read, in the proxy, or behind HAProxy in the router. So a router
asks here how much of its answer the client has taken, and sends little more (`cluster.ingress.router_side`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable

from msgspec import json
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.client_id import SERVERS_NAME, is_client_id
from cluster.errors import ApiError
from cluster.ingress.bounded_http import bound_http
from cluster.telemetry.logs import about, log_to_serve

# Ray Serve's variable for middleware around its proxy, and what it must say. Source: ray/serve/_private/constants.py.
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.ingress.guard:proxy_middlewares"
MARK = b"x-squadron-guard"  # on requests that came through the guard; a client's own is taken off
TELLS_TAKEN = b"2"  # its value: this guard reports what the client has taken, to a router that asks
ASKS_TAKEN = "squadron.tell_taken"  # beside the status of an answer whose router does
TAKEN = "squadron.taken"  # type of the message that reports it: `bytes` of the body, so far
WINDOWED = "windowed"  # key of `scope["state"]` in a router that sends no more than a little beyond that
TELL_BYTES = 1 << 18  # after so many it is reported, or
TELL_LEAST, TELL_SECONDS = 1 << 15, 5.0  # after these, when the last report is so long ago
CLOSED = "/-/routes"
STALLED = 600.0  # seconds; a client that takes nothing for so long is taken for gone
# Seconds in which a proxy that was just started may not know its apps yet, and says of any path that it is not there.
LEARNING = 10.0
_NUMBER = re.compile(rb'"sequence_number":(\d+)')  # the events of `/v1/responses` are numbered
log = logging.getLogger(__name__)


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve is to put around its proxy (called there, see `CALLBACK_VARIABLE`)."""
    log_to_serve()
    bound_http()
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
        if scope["path"][len(scope.get("root_path", "")) :] == CLOSED:  # as Serve looks at it
            await refuse(not_there(_request_id(scope) or f"req-{secrets.token_hex(16)}"), send)
            return
        named = _request_id(scope) is not None
        scope["headers"] = [*(one for one in scope["headers"] if one[0] != MARK), (MARK, TELLS_TAKEN)]
        exchange = _Exchange(receive, send, learning=self._clock() < self._learns_until, named=named)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("the proxy failed under a request")
        finally:
            exchange.close()
        if not exchange.over:
            await exchange.lost(exchange.shown_id or _request_id(scope))


class _Exchange:
    """How far one answer got. learning: a 404 of the proxy itself is no answer, for its apps may be there already.

    named: the client has a name of its own for the request. shown_id: the router's, where the answer shows that one.
    """

    def __init__(self, receive: Receive, send: Send, learning: bool, named: bool) -> None:
        self.over = False  # answered to the end, or the client is gone
        self.shown_id: str | None = None
        self._named = named
        self._receive = receive
        self._send = send
        self._learning = learning
        self._unknown = False
        self._started = False
        self._streams_events = False
        self._last = b""
        self._loop = asyncio.get_running_loop()
        self._arriving: asyncio.Future[Message] | None = None  # what the client sends next
        self._news = self._loop.create_future()  # done when the router is to be notified
        self._stalled = False
        self._asked = False
        self._taken = self._told = 0
        self._told_at = self._loop.time()

    async def receive(self) -> Message:
        """Return what the client sends next, or how much it has taken, whichever comes first."""
        if self._arriving is None:
            self._arriving = asyncio.ensure_future(self._receive())
        await asyncio.wait((self._arriving, self._news), return_when=asyncio.FIRST_COMPLETED)
        if self._stalled:
            return {"type": "http.disconnect"}
        if not self._arriving.done():
            self._news = self._loop.create_future()
            return {"type": TAKEN, "bytes": self._taken}
        message, self._arriving = self._arriving.result(), None
        self.over |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._asked = message.pop(ASKS_TAKEN, False)
            message["headers"] = self._with_one_id(message["headers"])
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._unknown = self._learning and message["status"] == 404 and kind.startswith("text/plain")
            self._streams_events = kind.startswith("text/event-stream")
        if self._unknown or self._stalled:
            return
        self._started = True
        if message["type"] == "http.response.body":
            self._last = message.get("body") or self._last
            self.over |= not message.get("more_body", False)
        await self._pass_on(message)
        if self._asked:
            self._note_taken(len(message.get("body", b"")))

    def _with_one_id(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers with the id that errors have in their bodies, in place of one that Serve made up."""
        given = [(name.lower(), value) for name, value in headers]
        servers = next((value for name, value in given if name == SERVERS_NAME.encode()), None)
        kept = [one for one in given if one[0] != SERVERS_NAME.encode()]
        if servers is None or self._named:
            return kept
        self.shown_id = servers.decode("latin-1")
        return [one for one in kept if one[0] != b"x-request-id"] + [(b"x-request-id", servers)]

    def close(self) -> None:
        """Wait for nothing more."""
        if self._arriving is not None:
            self._arriving.cancel()

    async def _pass_on(self, message: Message) -> None:
        """Send to the client; one that stalls for too long has left, as far as the others can see."""
        try:
            async with asyncio.timeout(STALLED):
                await self._send(message)
        except TimeoutError:
            self.over = self._stalled = True
            self._wake()

    def _note_taken(self, size: int) -> None:
        """Take note of what is at the client, or in buffers of a fixed size on its way there."""
        self._taken += size
        untold, now = self._taken - self._told, self._loop.time()
        if untold >= TELL_BYTES or (untold >= TELL_LEAST and now - self._told_at >= TELL_SECONDS):
            self._told, self._told_at = self._taken, now
            self._wake()

    def _wake(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    async def lost(self, request_id: str | None) -> None:
        """Tell the client that its router is gone, or not there yet."""
        if self._unknown:
            await refuse(no_router(request_id), self._send)
            return
        extra = about({"client_id": request_id or ""})
        log.warning("request %s: its router was lost before its answer was complete", request_id, extra=extra)
        error = router_lost(request_id)
        if not self._started:
            await refuse(error, self._send)
        elif self._streams_events:
            await self._send({"type": "http.response.body", "body": self._last_event(error)})

    def _last_event(self, error: ApiError) -> bytes:
        """Return the event in the form that the stream's route gives its own errors."""
        body = error.body()
        numbers = _NUMBER.findall(self._last)
        if not numbers:
            return b"data: " + json.encode(body) + b"\n\n"
        told = {"code": error.code, "message": error.message, "param": error.param}
        event = {"type": "error", "sequence_number": int(numbers[-1]) + 1, **told, **body}
        return b"event: error\ndata: " + json.encode(event) + b"\n\n"


async def refuse(error: ApiError, send: Send) -> None:
    """Answer an exchange that has no answer yet with an error."""
    body = json.encode(error.body())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": error.request_id or "",
    }
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def router_lost(request_id: str | None) -> ApiError:
    """Return the error of an answer whose router died; the request can be sent again as it is."""
    message = "the router was lost before the answer was complete; send the request again"
    return ApiError("router_lost", message, request_id=request_id)


def no_router(request_id: str | None) -> ApiError:
    """Return the error of a request that came before this proxy knew of any router."""
    message = "the proxy has only just started and knows no router yet; send the request again"
    return ApiError("no_router", message, request_id=request_id)


def not_there(request_id: str) -> ApiError:
    """Return the error of a path that Serve would answer, and that is none of the app's."""
    message = f"there is nothing at {CLOSED!r}; /openapi.json lists what there is, /ui is a page"
    return ApiError("not_found", message, request_id=request_id)


def _request_id(scope: Scope) -> str | None:
    """The id that the answer shows as `x-request-id`: Serve's proxy puts one on every request that brings none.

    None where a client's own is unfit for a line of a log.
    """
    name = Headers(scope=scope).get("x-request-id", "")
    return name if is_client_id(name) else None
