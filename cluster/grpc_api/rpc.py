"""One RPC from its metadata to its status: ids, keys, one typed error however it fails, and a count of its answer.

An error is a status code, and in the trailing metadata what else there is to know.
Source: grpc.io, "Status codes"; google.rpc.Status and its ErrorInfo and RetryInfo, which clients' libraries read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from cluster.admission.deadline import HEADER, timeout_of
from cluster.answer_log import AnswerLog, NoLog
from cluster.client_id import SESSION_HEADER, is_client_id
from cluster.errors import ApiError, as_api_error
from cluster.grpc_api.protobuf import renamed
from cluster.openai.fields import IGNORED_HEADER
from cluster.telemetry.logs import about
from cluster.telemetry.tracing import semantics as names
from engine.errors import InvalidRequestError, redacted

if TYPE_CHECKING:
    from cluster.telemetry.tracing.call_trace import CallTrace

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
TrailingMetadata = tuple[tuple[str, str | bytes], ...]
logger = logging.getLogger(__name__)
Answered = Callable[[str, str, str], None]  # method, status, id of the model or ""
Metadata = Iterable[tuple[str, str | bytes]]
Traced = Callable[[str, Metadata | None], "CallTrace | None"]  # method, metadata


class RpcContext(Protocol):
    """What a method needs of its call: a `grpc.aio.ServicerContext`, or what stands for one behind a gateway."""

    def invocation_metadata(self) -> Metadata | None:
        """Return what the client sent beside the request."""

    def time_remaining(self) -> float | None:
        """Return the seconds that the client's deadline leaves, None without one."""

    def set_trailing_metadata(self, trailing: TrailingMetadata) -> None:
        """Say what follows the last message."""

    async def write(self, message: Message) -> None:
        """Send one message."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: TrailingMetadata) -> Any:
        """End the call with a status."""


@dataclass(slots=True)
class Rpc:
    """One RPC. id: made here, or the generation's own. client_id: the client's label, only echoed and logged.

    timeouts: what the client sent as `x-request-timeout-seconds`. remaining: seconds of its gRPC deadline, None
    without one. arrival: on the event loop's clock.
    model: id of the one that is asked, "" before it is known.
    session: the client's `x-session-id` as it came, "" without. tenant: whose key it has, "" before that is known.
    trace: of the call, None where it is not traced. ignored: fields of the request that had no use. log: what is
    kept of its answer.
    """

    method: str
    authorization: str
    id: str
    client_id: str
    timeouts: list[str]
    remaining: float | None
    arrival: float
    model: str = ""
    session: str = ""
    tenant: str = ""
    trace: CallTrace | None = None
    ignored: tuple[str, ...] = ()
    log: AnswerLog = field(default_factory=NoLog)

    def deadline(self) -> float | None:
        """Return when the call ends at the latest, on the event loop's clock; raises `ApiError` for bad metadata."""
        spans = [span for span in (timeout_of(self.timeouts), self.remaining) if span is not None]
        return self.arrival + min(spans) if spans else None

    @property
    def shown_id(self) -> str:
        """What goes back as `x-request-id`."""
        return self.client_id or self.id

    def names(self, error: str = "") -> dict[str, str]:
        """Return the fields of the call's log lines. error: code of the answer that is one."""
        trace_id = "" if self.trace is None else self.trace.trace_id
        known = {"id": self.id, "client_id": self.client_id, "tenant": self.tenant, "model": self.model}
        return {**known, "error": error, "trace_id": trace_id}

    def traced(self) -> tuple[tuple[str, str], ...]:
        """Return what follows any answer where the call is traced."""
        return () if self.trace is None else (("traceresponse", self.trace.response),)

    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Return what follows a complete answer."""
        ignored = ((IGNORED_HEADER, ", ".join(self.ignored)),) if self.ignored else ()
        return (("x-request-id", self.shown_id), *ignored, *self.traced())


@asynccontextmanager
async def exchange(
    method: str, context: RpcContext, answered: Answered, traced: Traced | None = None
) -> AsyncGenerator[Rpc, None]:
    """Run one RPC. Whatever it raises becomes its status; `answered` hears of it. traced: begins its trace."""
    metadata = context.invocation_metadata()
    label = metadata_value(metadata, "x-request-id")
    log: AnswerLog = getattr(context, "answer_log", None) or NoLog()
    remaining = context.time_remaining()
    rpc = Rpc(
        method,
        metadata_value(metadata, "authorization"),
        f"req-{secrets.token_hex(16)}",
        label if is_client_id(label) else "",
        [value for key, value in metadata or () if key == HEADER and isinstance(value, str)],
        None if remaining is None else remaining + log.elapsed,
        asyncio.get_running_loop().time() - log.elapsed,
        session=metadata_value(metadata, SESSION_HEADER),
        trace=None if traced is None else traced(method, metadata),
        log=log,
    )
    try:
        yield rpc
        context.set_trailing_metadata(rpc.trailing())
        _record(rpc, grpc.StatusCode.OK, answered)
    except asyncio.CancelledError:
        _left(rpc, answered)
        raise
    except grpc.aio.InternalError:  # nothing can be written any more: the news that the client left comes later
        _left(rpc, answered)
    except InvalidRequestError as error:
        await _fail(context, as_api_error(renamed(error)), rpc, answered)
    except ApiError as error:
        await _fail(context, error, rpc, answered)
    except Exception as error:
        logger.error("request %s failed inside", rpc.id, exc_info=redacted(error), extra=about(rpc.names()))
        sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
        await _fail(context, sorry, rpc, answered)


def metadata_value(metadata: Metadata | None, name: str) -> str:
    """Return the first text value of `name`, "" without one."""
    for key, value in metadata or ():
        if key == name and isinstance(value, str):
            return value
    return ""


def _record(rpc: Rpc, code: grpc.StatusCode, answered: Answered, error: str = "", failed: bool = False) -> None:
    """Count the answer and end the trace. error: its code; failed: by our fault."""
    answered(rpc.method, code.name, rpc.model)
    if rpc.trace is not None:
        told = {
            names.RPC_RESPONSE_STATUS_CODE: code.name,
            names.REQUEST_ID: rpc.id,
            names.CLIENT_REQUEST_ID: rpc.client_id,
            names.TENANT: rpc.tenant,
        }
        rpc.trace.end(told, error, failed)


def _left(rpc: Rpc, answered: Answered) -> None:
    _record(rpc, grpc.StatusCode.CANCELLED, answered, names.CANCELLED)
    message = "request %s (client id %r): the client left, or its deadline passed"
    logger.info(message, rpc.id, rpc.client_id, extra=about(rpc.names()))


async def _fail(context: RpcContext, error: ApiError, rpc: Rpc, answered: Answered) -> None:
    error.request_id = rpc.id
    code = status_code(error)
    told = rpc.id, rpc.client_id, code.name, error.code
    logger.info("request %s (client id %r): %s %s", *told, extra=about(rpc.names(error.code)))
    _record(rpc, code, answered, error.code, failed=error.status >= 500)
    with suppress(grpc.aio.InternalError):  # the client is gone
        told_last = (*trailing_metadata(error, rpc.shown_id), *rpc.traced())
        await context.abort(code, status_message(error), told_last)


def status_code(error: ApiError) -> grpc.StatusCode:
    """Return the code that says what the error's HTTP status says."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def status_message(error: ApiError) -> str:
    """Return the error's sentence, cut to what metadata may carry."""
    return error.message.encode("utf-8", "replace")[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def trailing_metadata(error: ApiError, request_id: str) -> TrailingMetadata:
    """Return a `google.rpc.Status`, and `x-request-id` and `retry-after` for those who do not read it.

    request_id: the client's own label where it gave one; the details hold the server's.
    """
    code, _ = status_code(error).value
    status = Status(code=code, message=status_message(error), details=[_packed(one) for one in _details(error)])
    retry = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    return ((DETAILS_KEY, status.SerializeToString()), ("x-request-id", request_id), *retry)


def error_of(trailing: TrailingMetadata) -> dict[str, Any]:
    """Return what `trailing_metadata` tells of an error beside its message: `code`, `retryable` and the like."""
    status = Status.FromString(next(value for name, value in trailing if name == DETAILS_KEY))
    info = ErrorInfo()
    status.details[0].Unpack(info)
    told = dict(info.metadata)
    return {"code": info.reason, **told, "retryable": told["retryable"] == "true"}


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
