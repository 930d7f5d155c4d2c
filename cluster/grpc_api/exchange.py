"""One RPC from its metadata to its status: ids, keys, and one typed error however it fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from cluster.admission.deadline import HEADER, timeout_of
from cluster.client_id import is_client_id
from cluster.errors import ApiError, as_api_error
from cluster.grpc_api.requests import renamed
from cluster.grpc_api.status import status_code, status_message, trailing_metadata
from cluster.routing.session import HEADER as SESSION_HEADER
from engine.errors import InvalidRequestError

log = logging.getLogger(__name__)
Answered = Callable[[str, str, str], None]  # method, status, id of the model or ""


@dataclass(slots=True)
class Exchange:
    """One RPC. id: made here, or the generation's own. client_id: the client's label, only echoed and logged.

    timeouts: what the client sent as `x-request-timeout-seconds`. remaining: seconds of its gRPC deadline, None
    without one. arrival: on the event loop's clock.
    model: id of the one that is asked, "" before it is known.
    session: the client's `x-session-id` as it came, "" without.
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

    def deadline(self) -> float | None:
        """Return when the call ends at the latest, on the event loop's clock; raises `ApiError` for bad metadata."""
        spans = [span for span in (timeout_of(self.timeouts), self.remaining) if span is not None]
        return self.arrival + min(spans) if spans else None

    @property
    def shown_id(self) -> str:
        """What goes back as `x-request-id`."""
        return self.client_id or self.id


def metadata_value(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str:
    """Return the first text value of `name`, "" without one."""
    for key, value in metadata or ():
        if key == name and isinstance(value, str):
            return value
    return ""


@asynccontextmanager
async def exchange(
    method: str, context: grpc.aio.ServicerContext, answered: Answered
) -> AsyncGenerator[Exchange, None]:
    """Run one RPC. Whatever it raises becomes its status; `answered` hears of it."""
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
    )
    try:
        yield rpc
        context.set_trailing_metadata((("x-request-id", rpc.shown_id),))
        answered(method, grpc.StatusCode.OK.name, rpc.model)
    except asyncio.CancelledError:
        _left(rpc, answered)
        raise
    except grpc.aio.InternalError:  # nothing can be written any more: the news that the client left comes later
        _left(rpc, answered)
    except InvalidRequestError as error:
        await _fail(context, as_api_error(renamed(error)), rpc, answered)
    except ApiError as error:
        await _fail(context, error, rpc, answered)
    except Exception:
        log.exception("request %s failed inside", rpc.id)
        sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
        await _fail(context, sorry, rpc, answered)


def _left(rpc: Exchange, answered: Answered) -> None:
    answered(rpc.method, grpc.StatusCode.CANCELLED.name, rpc.model)
    log.info("request %s (client id %r): the client left, or its deadline passed", rpc.id, rpc.client_id)


async def _fail(context: grpc.aio.ServicerContext, error: ApiError, rpc: Exchange, answered: Answered) -> None:
    error.request_id = rpc.id
    code = status_code(error)
    log.info("request %s (client id %r): %s %s", rpc.id, rpc.client_id, code.name, error.code)
    answered(rpc.method, code.name, rpc.model)
    with suppress(grpc.aio.InternalError):  # the client is gone: nobody is left to tell
        await context.abort(code, status_message(error), trailing_metadata(error, rpc.shown_id))
