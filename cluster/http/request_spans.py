"""Where calls come in: their spans, around what HTTP and gRPC do with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.gate import raw_path
from cluster.telemetry.tracing import semantics as names
from cluster.telemetry.tracing.call_trace import CallTrace, call_trace
from cluster.telemetry.tracing.provider import Tracing

SERVICE = "squadron.v1.Inference"


class RouterTracing:
    """Traces what comes in at a router's two ingresses."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def app(self, app: ASGIApp) -> ASGIApp:
        """Return `app`, traced. At its shutdown all spans are exported and tracing ends."""
        return TracedApp(app, self._tracing)

    def rpc(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> CallTrace | None:
        """Return the trace of a gRPC call, None where its method is not traced, or it is not sampled."""
        operation = names.RPC_OPERATIONS.get(method)
        if operation is None:
            return None
        name = f"{SERVICE}/{method}"
        about = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: name}
        return call_trace(self._tracing, name, operation, _carrier(metadata or ()), about)


class TracedApp:
    """ASGI middleware around the gate: a span for each call of a route that generates.

    It puts the call's trace into `scope["state"]["trace"]`, and reads from the gate's `exchange` what became of it.
    Other routes, which probes ask again and again, are not traced.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._closing(send))
            return
        trace = self._begin(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["trace"] = trace
        status, broken_off = 0, names.CANCELLED

        async def send_traced(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"traceresponse", trace.response.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
            broken_off = ""
        except Exception:
            broken_off = "internal_error"
            raise
        finally:
            _end(trace, scope["state"].get("exchange", {}), status, broken_off)

    def _closing(self, send: Send) -> Send:
        async def close_and_send(message: Message) -> None:
            # The app is done then, and the client waits for nothing after this.
            if message["type"].startswith("lifespan.shutdown."):
                await asyncio.to_thread(self._tracing.close)
            await send(message)

        return close_and_send

    def _begin(self, scope: Scope) -> CallTrace | None:
        path = raw_path(scope)
        operation = names.HTTP_OPERATIONS.get(path)
        if operation is None:
            return None
        about = {names.HTTP_REQUEST_METHOD: "POST", names.HTTP_ROUTE: path, names.URL_PATH: path}
        about[names.URL_SCHEME] = scope.get("scheme", "http")
        return call_trace(self._tracing, f"POST {path}", operation, _carrier(Headers(scope=scope).items()), about)


def _carrier(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return what a call brings as the context of its trace.

    `tracestate` may come in several headers, which are one list; a call with several `traceparent` has no parent, and
    joined they are none. Source: W3C Trace Context, 3.3.1.
    """
    brought: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in headers:
        if name in brought and isinstance(value, str):
            brought[name].append(value)
    return {name: ",".join(values) for name, values in brought.items()}


def _end(trace: CallTrace, exchange: dict[str, str], status: int, broken_off: str) -> None:
    """End the trace of a call. broken_off: what became of it where the app did not return, "" where it did."""
    error = exchange.get("error") or broken_off or ("" if status else names.CANCELLED)
    told: dict[str, str | int] = {
        names.REQUEST_ID: exchange.get("id", ""),
        names.CLIENT_REQUEST_ID: exchange.get("client_id", ""),
        names.TENANT: exchange.get("tenant", ""),
    }
    if status:
        told[names.HTTP_RESPONSE_STATUS_CODE] = status
    # An error after a 200 is one in the middle of a stream.
    trace.end(told, error, failed=status >= 500 or (bool(error) and error != names.CANCELLED and status < 300))
