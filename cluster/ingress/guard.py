"""ASGI middleware around Ray Serve's proxy: answers outlive their routers there, and routers hear of slow clients.

Serve's proxy knows nothing of what it passes on. Where a router dies, a stream simply stops: a client of HTTP/1.1 may
notice that the body lacks its last chunk, others (HTTP/1.0, and all behind a reverse proxy that speaks it) believe it
whole; and who had no answer yet gets a bare 500. This sits in the proxy's process, which holds the connection of the
client, and asks another router for the rest.

Serve's proxy answers two paths itself, without a key. `/-/healthz` says one word and stays, for KubeRay and balancers
look there; `/-/routes`, the names of all apps and where they are, is answered here as a path that is not there.

And Serve queues without bound what a client does not read. So a router asks here how much of its answer the client
has taken, and sends little more (`cluster.ingress.router_side`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import json
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.admission.deadline import deadline_exceeded
from cluster.client_id import is_client_id
from cluster.error_forms import MESSAGES_FORM, OPENAI_FORM, ErrorForm, error_of
from cluster.errors import ApiError
from cluster.ingress.attempt import Attempt, Habits
from cluster.ingress.bounded_http import bound_http
from cluster.ingress.exchange import Exchange, KeptBytes
from cluster.telemetry.logs import about, log_to_serve

# Ray Serve's variable for middleware around its proxy, and what it must say. Source: ray/serve/_private/constants.py.
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.ingress.guard:proxy_middlewares"
MARK = b"x-squadron-guard"  # on requests that came through the guard; a client's own is taken off
TELLS_TAKEN = b"2"  # its value: this guard reports what the client has taken, to a router that asks
WINDOWED = "windowed"  # key of `scope["state"]` in a router that sends no more than a little beyond that
CLOSED = "/-/routes"
# Routers that may die of a request: without bringing anything, before they say that they have it, and in all.
MOST_LOSSES, MOST_TRIES, MOST_OF_ALL = 3, 12, 24
# Seconds in which a proxy that was just started may not know its apps yet, and says of any path that it is not there.
LEARNING = 10.0
CHANGED = "model_changed"  # of a refusal that no later router takes back
_NUMBER = re.compile(rb'"sequence_number":(\d+)')  # the events of `/v1/responses` are numbered
log = logging.getLogger(__name__)


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve is to put around its proxy (called there, see `CALLBACK_VARIABLE`)."""
    log_to_serve()
    bound_http()
    return [Middleware(RouterLossGuard)]


class RouterLossGuard:
    """Watches every HTTP answer that passes; one that its router did not complete is completed by another router.

    gateway: its app is routers alone, which are known to say something now and then; else it is Serve's proxy.

    What has no effect but its answer is asked again, with all that the lost router told of the answer: the client
    sees a pause. Where that cannot be, the answer is completed here: a stream of events gets a last event, the error
    `router_lost`; an exchange without an answer gets it as a 503. Any other body that was begun is left as it is, a
    stream in the middle of an event, too: its server closes the connection short of the announced length.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic, gateway: bool = False) -> None:
        self._app = app
        self._clock = clock
        self._learns_until = clock() + LEARNING
        self._kept = KeptBytes()
        self._habits = Habits(alone=gateway)

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
        exchange = Exchange(scope, receive, send, self._kept, named)
        try:
            await self._answered(exchange, send)
        finally:
            exchange.close()

    async def _answered(self, exchange: Exchange, send: Send) -> None:
        """Have routers answer, one after the other, until the answer is complete."""
        losses = Losses()
        while True:
            attempt = Attempt(exchange, self._habits, self._clock() < self._learns_until)
            scope = exchange.scope_of(again=losses.had_it)
            await attempt.run(self._app, scope, losses.until)
            if exchange.over:
                return
            if attempt.unknown:
                await refuse(no_router(exchange.shown_id or _request_id(scope)), send, exchange.error_form)
                return
            losses.add(exchange.progress, attempt, self._habits.wait)
            why = _why_final(attempt, losses)
            if why is None and exchange.continuable:
                await exchange.pause(losses.pause)
            if exchange.over:
                return
            if exchange.is_late:
                why = why or "its client waits no longer"
            if why is not None or not exchange.continuable:
                name = exchange.shown_id or _request_id(scope)
                extra = about({"client_id": name or ""})
                told = name, why or "it cannot be asked again"
                log.warning("request %s: its router was lost before its answer was complete; %s", *told, extra=extra)
                lost = deadline_exceeded(request_id=name) if exchange.is_late else router_lost(name)
                await _tell_loss(exchange, send, lost, attempt.refused)
                return


class Losses:
    """The routers that an exchange has lost since its answer last came on.

    until: when another one must have said something, on the event loop's clock; None before the first loss.
    """

    def __init__(self) -> None:
        self.until: float | None = None
        self.had_it = False  # whether any of them is known to have had the request
        self._progress: tuple[int, int] | None = None
        self._with_it = 0  # routers that had the request and brought nothing
        self._tries = self._pauses = 0
        self._all = 0

    @property
    def too_many(self) -> str | None:
        """Why to give up: nobody came in time, or all who had the request died of it, for all one can see."""
        if self._with_it >= MOST_LOSSES or self._tries >= MOST_TRIES or self._all >= MOST_OF_ALL:
            return f"{self._all} routers died of it"
        late = self.until is not None and asyncio.get_running_loop().time() >= self.until
        return "no other router went on with it in time" if late else None

    @property
    def pause(self) -> float:
        """Seconds until it is asked again: Serve takes a moment to notice that a router is gone."""
        return float(min(0.01 * 2**self._pauses, 1.0))

    def add(self, progress: tuple[int, int], attempt: Attempt, wait: float) -> None:
        """Take note of a loss. progress: of the answer, so far. wait: seconds that it may wait for another router.

        One that let it go as it leaves did not die of it: only those count that refuse what they are asked, in time.
        """
        if progress != self._progress:
            self._progress, self._with_it, self._tries, self._pauses = progress, 0, 0, 0
            self.until = None
        if self.until is None or (attempt.let_go and attempt.heard):
            self.until = asyncio.get_running_loop().time() + wait
        self.had_it |= attempt.heard
        self._pauses = 0 if attempt.let_go and attempt.heard else self._pauses + 1
        died = not attempt.silent and not attempt.let_go and attempt.refused is None
        self._with_it += died and attempt.heard
        self._tries += died
        self._all += died


def _why_final(attempt: Attempt, losses: Losses) -> str | None:
    """Return why no further router is asked, None where one is."""
    if attempt.differs:
        return "another router made another answer"
    if (refused := attempt.refused) is not None and (not refused.get("retryable") or refused["code"] == CHANGED):
        return f"another router refused it: {refused.get('code')}"
    return losses.too_many


async def _tell_loss(exchange: Exchange, send: Send, lost: ApiError, refused: Mapping[str, Any] | None) -> None:
    """Tell the client that its router is gone, and no other one goes on. refused: the error of one that would not."""
    if not exchange.started:
        await refuse(lost, send, exchange.error_form)
    elif exchange.streams_events and exchange.between_events:
        told = refused or error_of(lost)
        await send({"type": "http.response.body", "body": _last_event(exchange, told)})


def _last_event(exchange: Exchange, error: Mapping[str, Any]) -> bytes:
    """Return the event in the form that the stream's route gives its own errors."""
    numbers = _NUMBER.findall(exchange.last) if exchange.error_form is OPENAI_FORM else ()
    if not numbers:
        return exchange.error_form.frame(error)
    told = {name: error.get(name) for name in ("code", "message", "param")}
    event = {"type": "error", "sequence_number": int(numbers[-1]) + 1, **told, "error": error}
    return b"event: error\ndata: " + json.encode(event) + b"\n\n"


async def refuse(error: ApiError, send: Send, form: ErrorForm = OPENAI_FORM) -> None:
    """Answer an exchange that has no answer yet with an error."""
    body = json.encode(form.body(error_of(error)))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": error.request_id or "",
    }
    if form is MESSAGES_FORM:
        headers["request-id"] = error.request_id or ""
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def router_lost(request_id: str | None) -> ApiError:
    """Return the error of an answer whose router died; the request can be sent again as it is."""
    message = "the router was lost before the answer was complete, and no other went on; send the request again"
    return ApiError("router_lost", message, request_id=request_id)


def no_router(request_id: str | None) -> ApiError:
    """Return the error of a request that came while no router was known."""
    message = "no router is known yet, or none is left; send the request again"
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
