"""One RPC from its metadata to its status: ids, keys, and one typed error however it fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from cluster.admission.deadline import HEADER, timeout_of
from cluster.client_id import is_client_id
from cluster.errors import ApiError, as_api_error
from cluster.grpc_api.requests import renamed
from cluster.grpc_api.status import status_code, status_message, trailing_metadata
from cluster.openai.hints import HEADER as IGNORED
from cluster.router.routing.session import HEADER as SESSION_HEADER
from cluster.telemetry.log_lines import about
from cluster.telemetry.tracing import semantics as names
from engine.errors import InvalidRequestError
from engine.telemetry.wordless import wordless

if TYPE_CHECKING:
    from cluster.telemetry.tracing.call_trace import CallTrace

log = logging.getLogger(__name__)
Answered = Callable[[str, str, str], None]  # method, status, id of the model or ""
Metadata = Iterable[tuple[str, str | bytes]]
Traced = Callable[[str, Metadata | None], "CallTrace | None"]  # method, metadata


@dataclass(slots=True)
class Exchange:
    """One RPC. id: made here, or the generation's own. client_id: the client's label, only echoed and logged.

    timeouts: what the client sent as `x-request-timeout-seconds`. remaining: seconds of its gRPC deadline, None
    without one. arrival: on the event loop's clock.
    model: id of the one that is asked, "" before it is known.
    session: the client's `x-session-id` as it came, "" without. tenant: whose key it has, "" before that is known.
    trace: of the call, None where it is not traced. ignored: fields of the request that had no use.
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

    def deadline(self) -> float | None:
        """Return when the call ends at the latest, on the event loop's clock; raises `ApiError` for bad metadata."""
        spans = [span for span in (timeout_of(self.timeouts), self.remaining) if span is not None]
        return self.arrival + min(spans) if spans else None

    @property
    def shown_id(self) -> str:
        """What goes back as `x-request-id`."""
        return self.client_id or self.id

    def names(self, error: str = "") -> dict[str, str]:
        """Return what log lines tell of the call. error: code of the answer that is one."""
        trace_id = "" if self.trace is None else self.trace.trace_id
        known = {"id": self.id, "client_id": self.client_id, "tenant": self.tenant, "model": self.model}
        return {**known, "error": error, "trace_id": trace_id}

    def traced(self) -> tuple[tuple[str, str], ...]:
        """Return what follows any answer where the call is traced."""
        return () if self.trace is None else (("traceresponse", self.trace.response),)

    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Return what follows a complete answer."""
        ignored = ((IGNORED, ", ".join(self.ignored)),) if self.ignored else ()
        return (("x-request-id", self.shown_id), *ignored, *self.traced())


def metadata_value(metadata: Metadata | None, name: str) -> str:
    """Return the first text value of `name`, "" without one."""
    for key, value in metadata or ():
        if key == name and isinstance(value, str):
            return value
    return ""


@asynccontextmanager
async def exchange(
    method: str, context: grpc.aio.ServicerContext, answered: Answered, traced: Traced | None = None
) -> AsyncGenerator[Exchange, None]:
    """Run one RPC. Whatever it raises becomes its status; `answered` hears of it. traced: begins its trace."""
    metadata = context.invocation_metadata()
    label = metadata_value(metadata, "x-request-id")
    rpc = Exchange(
        method,
        metadata_value(metadata, "authorization"),
        f"req-{secrets.token_hex(16)}",
        label if is_client_id(label) else "",
        [value for key, value in metadata or () if key == HEADER and isinstance(value, str)],
        context.time_remaining(),
        asyncio.get_running_loop().time(),
        session=metadata_value(metadata, SESSION_HEADER),
        trace=None if traced is None else traced(method, metadata),
    )
    try:
        yield rpc
        context.set_trailing_metadata(rpc.trailing())
        _told(rpc, grpc.StatusCode.OK, answered)
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
        log.error("request %s failed inside", rpc.id, exc_info=wordless(error), extra=about(rpc.names()))
        sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
        await _fail(context, sorry, rpc, answered)


def _told(rpc: Exchange, code: grpc.StatusCode, answered: Answered, error: str = "", failed: bool = False) -> None:
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


def _left(rpc: Exchange, answered: Answered) -> None:
    _told(rpc, grpc.StatusCode.CANCELLED, answered, names.CANCELLED)
    message = "request %s (client id %r): the client left, or its deadline passed"
    log.info(message, rpc.id, rpc.client_id, extra=about(rpc.names()))


async def _fail(context: grpc.aio.ServicerContext, error: ApiError, rpc: Exchange, answered: Answered) -> None:
    error.request_id = rpc.id
    code = status_code(error)
    told = rpc.id, rpc.client_id, code.name, error.code
    log.info("request %s (client id %r): %s %s", *told, extra=about(rpc.names(error.code)))
    _told(rpc, code, answered, error.code, failed=error.status >= 500)
    with suppress(grpc.aio.InternalError):  # the client is gone: nobody is left to tell
        told_last = (*trailing_metadata(error, rpc.shown_id), *rpc.traced())
        await context.abort(code, status_message(error), told_last)
