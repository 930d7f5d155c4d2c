"""gRPC calls that a gateway forwards to a router, as exchanges whose answers are gRPC-Web's (`web_frames`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import Message
from msgspec import json
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.answer_log import ANSWER_LOG, CONTINUES, AnswerLog, NoLog
from cluster.errors import ApiError
from cluster.grpc_api.door import KNOWN, refusal, unknown
from cluster.grpc_api.rpc import Metadata, TrailingMetadata, error_of, exchange
from cluster.grpc_api.service import GrpcServices, InferenceService
from cluster.grpc_api.web_frames import CONTENT_TYPE, CallEnd, end_frame, message_frame
from cluster.http.asgi import disconnected
from cluster.ingress.exchange import CALL


class ForwardedCalls:
    """The app itself, which answers calls of gRPC, too, where a gateway brings them (ASGI)."""

    def __init__(self, app: ASGIApp, services: GrpcServices) -> None:
        self._app = app
        self._services = services
        self._service = InferenceService(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one exchange (ASGI)."""
        if CALL in scope:
            await self._answer(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if scope["type"] == "lifespan":
            self._service.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = ForwardedContext(scope, send)
        body = await _body(receive)
        if body is None:
            return
        work = asyncio.ensure_future(self._call(scope[CALL], body, context))
        left = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                await context.end()
        finally:
            for one in (work, left):
                one.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _call(self, call: Mapping[str, Any], body: bytes, context: ForwardedContext) -> None:
        """Run one method; whatever it raises becomes the status."""
        method = call["method"]
        refused = refusal(self._services.tenancy, method, context.invocation_metadata())
        if refused is None and call["refused"] and method in KNOWN:
            message = "the gateway has not read the file of keys again yet; send the request again"
            refused = ApiError("no_router", message)
        if refused is None and method in KNOWN:
            message = await getattr(self._service, KNOWN[method])(body, context)
            if message is not None:
                await context.write(message)
            return
        services = self._services
        async with exchange(KNOWN.get(method, "other"), context, services.answered, services.traced):
            raise refused or unknown(method)


async def _body(receive: Receive) -> bytes | None:
    """Return the request, None where its client left; a gateway has all of it before it brings it."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


class ForwardedContext:
    """What a method knows of its call (`cluster.grpc_api.rpc.RpcContext`)."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.answer_log: AnswerLog = scope["state"].get(ANSWER_LOG) or NoLog()
        self._metadata = tuple((name, value) for name, value in scope[CALL]["metadata"])
        remaining = scope[CALL]["remaining"]
        now = asyncio.get_running_loop().time()
        self._ends_at = None if remaining is None else now + remaining - self.answer_log.elapsed
        self._send = send
        self._continues = CONTINUES in scope
        self._started = False
        self._end = CallEnd(grpc.StatusCode.OK)

    def invocation_metadata(self) -> Metadata:
        """Return what the client sent beside the request."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Return the seconds that the client's deadline leaves, None without one."""
        return None if self._ends_at is None else self._ends_at - asyncio.get_running_loop().time()

    def set_trailing_metadata(self, trailing: TrailingMetadata) -> None:
        """Say what follows the last message."""
        self._end = CallEnd(self._end.code, self._end.message, tuple(trailing))

    async def write(self, message: Message) -> None:
        """Send one message."""
        await self._write(message_frame(message.SerializeToString()), more=True)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: TrailingMetadata = ()) -> None:
        """End the call with a status."""
        self._end = CallEnd(code, details, tuple(trailing_metadata))

    async def end(self) -> None:
        """Send the status.

        A router that refuses to go on with an answer says so as over HTTP: it is no end, if another one may go on.
        """
        if self._continues and not self._started and self._end.code is not grpc.StatusCode.OK:
            body = json.encode({"error": error_of(self._end.trailing) | {"message": self._end.message}})
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return
        await self._write(end_frame(self._end), more=False)

    async def _write(self, frame: bytes, more: bool) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", CONTENT_TYPE)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": frame, "more_body": more})
