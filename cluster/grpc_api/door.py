"""Who may call which method of gRPC, as its metadata tells: before any of the request is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.grpc_api.rpc import Metadata, metadata_value
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
