"""Our errors as gRPC tells them: a status code, and in the trailing metadata what else there is to know.

Source: grpc.io, "Status codes"; google.rpc.Status and its ErrorInfo and RetryInfo, which clients' libraries read.
"""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from cluster.errors import ApiError

DOMAIN = "squadron"
DETAILS_KEY = "grpc-status-details-bin"
# All trailing metadata must fit into 8 KiB, where each byte of text that is no ASCII takes three.
_MAX_MESSAGE_BYTES = 1000
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: ApiError) -> grpc.StatusCode:
    """Return the code that says what the error's HTTP status says."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def status_message(error: ApiError) -> str:
    """Return the error's sentence, cut to what metadata may carry."""
    return error.message.encode("utf-8", "replace")[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def trailing_metadata(error: ApiError, request_id: str) -> Metadata:
    """Return a `google.rpc.Status`, and `x-request-id` and `retry-after` for those who do not read it.

    request_id: the client's own label where it gave one; the details hold the server's.
    """
    code, _ = status_code(error).value
    status = Status(code=code, message=status_message(error), details=[_packed(one) for one in _details(error)])
    retry = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    return ((DETAILS_KEY, status.SerializeToString()), ("x-request-id", request_id), *retry)


def _details(error: ApiError) -> list[Message]:
    told = {
        "type": error.type,
        "param": error.param,
        "retryable": "true" if error.retryable else "false",
        "request_id": error.request_id,
    }
    info = ErrorInfo(reason=error.code, domain=DOMAIN, metadata={name: text for name, text in told.items() if text})
    if error.retry_after is None:
        return [info]
    retry = RetryInfo()
    retry.retry_delay.FromSeconds(error.retry_after)
    return [info, retry]


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
