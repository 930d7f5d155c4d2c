"""The router's own gRPC server: who may call, what is let in, and how it ends.

Serve's gRPC ingress is not used, for reasons that docs/guides/grpc.md gives: it listens on all interfaces, lets a
slow reader fill the memory, and bounds no message.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.grpc_api.rpc import Answered, Traced, exchange, metadata_value
from cluster.grpc_api.service import GrpcServices, InferenceService
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from engine.errors import ConfigError

log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
# Calls that one connection may have open. A client that opens calls only to reset them (CVE-2023-44487)
# fills the queue of calls that wait to be looked at no further than this; without a bound no other is answered for
# as long as one such connection goes on. gRPC's clients hold further calls back until some have ended.
MAX_CONNECTION_CALLS = 128
HANDSHAKE_MS = 20_000  # a connection on which HTTP/2 has not begun by then is closed
IDLE_MS = 15 * 60_000  # and one that has had no call for so long; clients connect anew by themselves
OPEN_METHODS = frozenset({f"/{SERVICE.full_name}/Health"})
SCRAPED_METHODS = frozenset({f"/{SERVICE.full_name}/GetLoad"})  # all that a key for scraping opens
_KNOWN = {f"/{SERVICE.full_name}/{method.name}": method.name for method in SERVICE.methods}


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen. port: 0 = any free one. Routers of one machine share a port; a connection stays with one."""

    host: str = "127.0.0.1"
    port: int = 0

    @property
    def text(self) -> str:
        """As gRPC writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class GrpcServer:
    """Made and used on one event loop. Raises `ConfigError` when its address is taken."""

    def __init__(self, address: ListenAddress, services: GrpcServices) -> None:
        self._address = address
        self._service = InferenceService(services)
        keys = KeyInterceptor(services.tenancy, services.answered, services.traced)
        self._server = grpc.aio.server(interceptors=[keys], options=_options(services.max_message_bytes))
        self._server.add_generic_rpc_handlers((_handlers(self._service),))
        reflection.enable_server_reflection((SERVICE.full_name, reflection.SERVICE_NAME), self._server)
        self.port = self._bound()

    async def start(self) -> None:
        """Take calls."""
        await self._server.start()
        log.info("gRPC listens on %s port %d", self._address.host, self.port)

    async def stop(self, grace: float) -> None:
        """Take no more calls, give those that run `grace` seconds, and end."""
        await self._server.stop(grace)
        self._service.close()

    def _bound(self) -> int:
        try:
            return int(self._server.add_insecure_port(self._address.text))
        except RuntimeError as error:
            message = f"grpc_port: cannot listen on {self._address.text}; choose another port, or another host"
            raise ConfigError(message, "grpc_port") from error


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who has a key, whatever is called: reflection, and methods that do not exist, too."""

    def __init__(self, tenancy: Tenancy, answered: Answered, traced: Traced | None = None) -> None:
        self._tenancy = tenancy
        self._answered = answered
        self._traced = traced

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Return the method's handler, or one that refuses without reading the request."""
        method = handler_call_details.method
        if method not in OPEN_METHODS:
            authorization = metadata_value(handler_call_details.invocation_metadata, "authorization")
            try:
                tenant = self._tenancy.tenant_of(authorization)
                if tenant.scrapes and method not in SCRAPED_METHODS:
                    raise ApiError("permission_denied", "this key reads figures alone: GetLoad; use a tenant's key")
            except ApiError as error:
                return self._refusal(error, _KNOWN.get(method, "other"))
        handler = await continuation(handler_call_details)
        if handler is None:
            message = f"there is no method {method[:100]!r}; the service is {SERVICE.full_name}"
            return self._refusal(ApiError("not_found", message, status=501), "other")
        return handler

    def _refusal(self, error: ApiError, name: str) -> grpc.RpcMethodHandler:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            async with exchange(name, context, self._answered, self._traced):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)


def _handlers(service: InferenceService) -> grpc.GenericRpcHandler:
    """Requests stay bytes: those that cannot be read are then refused in our own words."""
    handlers = {}
    for method in SERVICE.methods:
        kind = (
            grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = kind(getattr(service, method.name), response_serializer=_serialized)
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Identity only: what a compressed message grows to is not known before it has.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.so_reuseport", 1),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        # A client that is gone without a word is noticed, and its requests end.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


class BesideHttp:
    """The app itself, with a gRPC server that takes calls from the app's start to its shutdown (ASGI).

    grace: seconds that running calls get at the end. Serve counts only what comes through its own proxies, so that
    it would not wait for them.
    """

    def __init__(self, app: ASGIApp, server: GrpcServer, grace: float) -> None:
        self._app = app
        self._server = server
        self._grace = grace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on to the app."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def receive_and_stop() -> AsgiMessage:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._server.stop(self._grace)
            return message

        async def start_and_send(message: AsgiMessage) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._server.start()
            await send(message)

        await self._app(scope, receive_and_stop, start_and_send)
