"""Who may call which method of gRPC, as its first metadata tells: before any of the request is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.grpc_api.rpc import Answered, Metadata, Traced, exchange, metadata_value
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
OPEN_METHODS = frozenset({f"/{SERVICE.full_name}/Health"})
SCRAPED_METHODS = frozenset({f"/{SERVICE.full_name}/GetLoad"})  # all that a key for scraping opens
KNOWN = {f"/{SERVICE.full_name}/{method.name}": method.name for method in SERVICE.methods}
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


def refusal(tenancy: Tenancy, method: str, metadata: Metadata | None) -> ApiError | None:
    """Return why a call may not be made, None where it may: a key opens reflection and unknown methods, too."""
    if method in OPEN_METHODS:
        return None
    try:
        tenant = tenancy.tenant_of(metadata_value(metadata, "authorization"))
    except ApiError as error:
        return error
    if tenant.scrapes and method not in SCRAPED_METHODS:
        return ApiError("permission_denied", "this key reads figures alone: GetLoad; use a tenant's key")
    return None


def unknown(method: str) -> ApiError:
    """Return the error of a method that does not exist."""
    message = f"there is no method {method[:100]!r}; the service is {SERVICE.full_name}"
    return ApiError("not_found", message, status=501)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who has a key, whatever is called."""

    def __init__(self, tenancy: Tenancy, answered: Answered, traced: Traced | None = None) -> None:
        self._tenancy = tenancy
        self._answered = answered
        self._traced = traced

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Return the method's handler, or one that refuses without reading the request."""
        method = handler_call_details.method
        error = refusal(self._tenancy, method, handler_call_details.invocation_metadata)
        if error is not None:
            return self._refusing(error, KNOWN.get(method, "other"))
        handler = await continuation(handler_call_details)
        return self._refusing(unknown(method), "other") if handler is None else handler

    def _refusing(self, error: ApiError, name: str) -> grpc.RpcMethodHandler:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            async with exchange(name, context, self._answered, self._traced):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)
