"""gRPC calls that a gateway carries to a router, as exchanges whose answers are gRPC-Web's (`web_frames`)."""

from __future__ import annotations

import asyncio

import grpc
from google.protobuf.message import Message
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.answer_log import ANSWER_LOG, AnswerLog, NoLog
from cluster.grpc_api.door import KNOWN, refusal, unknown
from cluster.grpc_api.rpc import Metadata, TrailingMetadata, exchange
from cluster.grpc_api.service import GrpcServices, InferenceService
from cluster.grpc_api.web_frames import CONTENT_TYPE, CallEnd, end_frame, message_frame
from cluster.http.asgi import disconnected
from cluster.ingress.exchange import CALL


class CarriedCalls:
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
        context = CarriedContext(scope, send)
        asked = await receive()  # a gateway has the whole request before it brings it
        if asked["type"] == "http.disconnect":
            return
        body: bytes = asked.get("body", b"")
        work = asyncio.ensure_future(self._call(scope[CALL]["method"], body, context))
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

    async def _call(self, method: str, body: bytes, context: CarriedContext) -> None:
        """Run one method; whatever it raises becomes the status."""
        refused = refusal(self._services.tenancy, method, context.invocation_metadata())
        if refused is None and method in KNOWN:
            message = await getattr(self._service, KNOWN[method])(body, context)
            if message is not None:
                await context.write(message)
            return
        services = self._services
        async with exchange(KNOWN.get(method, "other"), context, services.answered, services.traced):
            raise refused or unknown(method)


class CarriedContext:
    """What a method knows of its call (`cluster.grpc_api.rpc.RpcContext`)."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.answer_log: AnswerLog = scope["state"].get(ANSWER_LOG) or NoLog()
        self._metadata = tuple((name, value) for name, value in scope[CALL]["metadata"])
        remaining = scope[CALL]["remaining"]
        now = asyncio.get_running_loop().time()
        self._ends_at = None if remaining is None else now + remaining - self.answer_log.elapsed
        self._send = send
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
        """Send the status."""
        await self._write(end_frame(self._end), more=False)

    async def _write(self, frame: bytes, more: bool) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", CONTENT_TYPE)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": frame, "more_body": more})
