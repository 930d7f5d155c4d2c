"""gRPC at a gateway: calls are forwarded to routers as exchanges, so that a router's death does not end them.

Keys are looked at here, before a request is read; what is refused a router refuses, which also counts it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from msgspec import DecodeError, json
from starlette.types import ASGIApp, Message, Scope

from cluster.admission.tenants import Tenancy
from cluster.client_id import is_client_id
from cluster.errors import ApiError
from cluster.grpc_api.door import SERVICE, Continuation, refusal
from cluster.grpc_api.rpc import metadata_value, status_code, status_message, trailing_metadata
from cluster.grpc_api.web_frames import CONTENT_TYPE, CallEnd, FrameReader
from cluster.ingress.exchange import CALL
from cluster.ingress.guard import MARK, TELLS_TAKEN, router_lost

ABORT = "Abort"
ABORT_SECONDS = 5.0  # in which routers must have said whether they run a call


class ForwardingService:
    """One method for each of the `.proto`. app: has some router answer an exchange (ASGI).

    routers: all that there are, each such an application: the one that runs a call is asked to end it.
    """

    def __init__(self, app: ASGIApp, routers: Callable[[], Sequence[ASGIApp]]) -> None:
        self._app = app
        self._routers = routers

    def close(self) -> None:
        """Nothing is left of calls that have ended."""

    def __getattr__(self, name: str) -> Any:
        method = SERVICE.methods_by_name.get(name)
        if method is None:
            raise AttributeError(name)
        full = f"/{SERVICE.full_name}/{name}"
        if method.server_streaming:
            return partial(self.forward, full)
        return partial(self._abort if name == ABORT else self._unary, full)

    async def forward(
        self, method: str, body: bytes, context: grpc.aio.ServicerContext, refused: bool = False
    ) -> None:
        """Have a router answer a call, and pass on what comes as it comes. refused: it may not be made."""
        call = _Forwarded(method, body, context, refused=refused)
        await call.run(self._app)
        await call.end()

    async def _unary(self, method: str, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        call = _Forwarded(method, body, context, whole=True)
        await call.run(self._app)
        await call.end()
        return call.message

    async def _abort(self, method: str, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Ask all routers: one of them has run the call. Where there is none now, the next one is asked."""
        routers = self._routers() or (self._app,)
        calls = [_Forwarded(method, body, context, whole=True) for _ in routers]
        asked = [asyncio.ensure_future(call.run(router)) for call, router in zip(calls, routers, strict=True)]
        await asyncio.wait(asked, timeout=ABORT_SECONDS)
        for task in asked:
            task.cancel()
        told = max(calls, key=lambda call: (call.ended_well, call.ended))
        await told.end()
        return told.message


class ForwardingInterceptor(grpc.aio.ServerInterceptor):
    """Has a router refuse who has no key, without reading the request."""

    def __init__(self, tenancy: Tenancy, service: ForwardingService) -> None:
        self._tenancy = tenancy
        self._service = service

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Return the method's handler, or one that has it refused."""
        method = handler_call_details.method
        if refusal(self._tenancy, method, handler_call_details.invocation_metadata) is None:
            handler = await continuation(handler_call_details)
            if handler is not None:
                return handler

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await self._service.forward(method, b"", context, refused=True)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _Forwarded:
    """One call on its way. whole: its only message is kept in `message`, and not passed on as it comes."""

    def __init__(
        self,
        method: str,
        body: bytes,
        context: grpc.aio.ServicerContext,
        whole: bool = False,
        refused: bool = False,
    ) -> None:
        self._stalled = False
        self.message = b""
        self._whole = whole
        self._context = context
        self._asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._frames = FrameReader()
        self._refused: bytearray | None = None  # of an answer that the guard gives itself
        self._end: CallEnd | None = None
        metadata = [(str(name), value) for name, value in context.invocation_metadata() or ()]
        label = metadata_value(metadata, "x-request-id")
        self._shown_id = label if is_client_id(label) else f"req-{secrets.token_hex(16)}"
        self._scope: Scope = {
            "type": "http",
            "http_version": "2",
            "method": "POST",
            "scheme": "http",
            "path": method,
            "query_string": b"",
            "headers": [(b"x-request-id", self._shown_id.encode()), (MARK, TELLS_TAKEN)],
            CALL: {
                "method": method,
                "metadata": metadata,
                "remaining": context.time_remaining(),
                "refused": refused,
            },
        }

    async def run(self, app: ASGIApp) -> None:
        """Have the call answered by an application."""
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        """Return the request; after that nothing comes, for who leaves has the call cancelled."""
        if self._asked:
            return self._asked.pop()
        return await asyncio.get_running_loop().create_future()

    async def _send(self, message: Message) -> None:
        """Take one message of the answer."""
        if message["type"] == "http.response.start":
            if dict(message["headers"]).get(b"content-type") != CONTENT_TYPE:
                self._refused = bytearray()
            return
        body = message.get("body", b"")
        if self._refused is not None:
            self._refused += body
            return
        for frame in self._frames.take(body):
            if isinstance(frame, CallEnd):
                self._end = frame
            elif self._whole:
                self.message = frame
            else:
                await self._write(frame)

    async def _write(self, frame: bytes) -> None:
        self._stalled = True  # should the guard give the client up while it reads nothing
        await self._context.write(frame)
        self._stalled = False

    @property
    def ended(self) -> bool:
        """Whether the router has said how the call ended."""
        return self._end is not None

    @property
    def ended_well(self) -> bool:
        """Whether the router did what it was asked."""
        return self._end is not None and self._end.code is grpc.StatusCode.OK

    async def end(self) -> None:
        """End the call as the router said, or with the error of one that was lost."""
        end = self._end or _end_of(self._refused, self._shown_id, self._stalled)
        if end.code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(end.trailing)
        else:
            await self._context.abort(end.code, end.message, end.trailing)


def _end_of(refused: bytearray | None, request_id: str, stalled: bool) -> CallEnd:
    """Return the end of a call that no router ended. stalled: its client reads nothing."""
    try:
        told = json.decode(refused or b"")["error"]
        error = ApiError(told["code"], told["message"], request_id=request_id)
    except (DecodeError, KeyError, TypeError):
        error = router_lost(request_id)
    if stalled:
        message = "the client read nothing of its answer for too long"
        error = ApiError("slow_consumer", message, status=408, retryable=False, request_id=request_id)
    return CallEnd(status_code(error), status_message(error), trailing_metadata(error, request_id))
