"""The gRPC server of a gateway: what is let in, and how it ends.

Serve's gRPC ingress is not used, for reasons that docs/guides/grpc.md gives: it listens on all interfaces, lets a
slow reader fill the memory, and bounds no message.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection

from cluster.grpc_api.door import SERVICE
from engine.errors import ConfigError

log = logging.getLogger(__name__)
# Calls that one connection may have open. A client that opens calls only to reset them (CVE-2023-44487)
# fills the queue of calls that wait to be looked at no further than this; without a bound no other is answered for
# as long as one such connection goes on. gRPC's clients hold further calls back until some have ended.
MAX_CONNECTION_CALLS = 128
HANDSHAKE_MS = 20_000  # a connection on which HTTP/2 has not begun by then is closed
IDLE_MS = 15 * 60_000  # and one that has had no call for so long; clients connect anew by themselves


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen. port: 0 = any free one. Gateways of one machine share a port; a connection stays with one."""

    host: str = "127.0.0.1"
    port: int = 0

    @property
    def text(self) -> str:
        """As gRPC writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class GrpcServer:
    """Made and used on one event loop. Raises `ConfigError` when its address is taken.

    service: one method for each of the `.proto`; a request comes as bytes. door: who may call. max_message_bytes:
    of a request.
    """

    def __init__(
        self, address: ListenAddress, service: Any, door: grpc.aio.ServerInterceptor, max_message_bytes: int
    ) -> None:
        self._address = address
        self._service = service
        self._server = grpc.aio.server(interceptors=[door], options=_options(max_message_bytes))
        self._server.add_generic_rpc_handlers((_handlers(service),))
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


def _handlers(service: Any) -> grpc.GenericRpcHandler:
    """Requests stay bytes: those that cannot be read are then refused in our own words."""
    handlers = {}
    for method in SERVICE.methods:
        kind = (
            grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = kind(getattr(service, method.name), response_serializer=_serialized)
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _serialized(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


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
