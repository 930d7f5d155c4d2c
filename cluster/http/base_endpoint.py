"""What all endpoints do alike: read a bounded body, and end in one whole answer or one typed error."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from cluster.admission.tenancy import Visit
from cluster.errors import ApiError, as_api_error
from cluster.http.exchange import READ_PATIENCE, Answer, ClientGone, ClientStalled, read_body, until_disconnect
from cluster.openai.off_loop import OffLoop
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_json
from cluster.router.models.front import ModelFront
from cluster.router.models.registry import Models
from cluster.telemetry.log_lines import about
from engine.errors import InvalidRequestError
from engine.telemetry.wordless import wordless

LAST_PATIENCE = 1.0  # seconds that the error may take on its way to a client that reads no more
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints share: the models, who tokenizes, and how much a client may send."""

    models: Models
    off_loop: OffLoop
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose model is known. num_bytes: of its body. exchange: its ids and names, as `Gate` tells."""

    front: ModelFront
    fields: Mapping[str, Any]
    num_bytes: int
    exchange: dict[str, str]
    visit: Visit

    def tell_ignored(self, names: Sequence[str]) -> None:
        """Have the answer name fields of the request that had no use."""
        if names:
            self.exchange["ignored"] = ", ".join(names)


class Responder(ABC):
    """An ASGI application. Every call ends in one whole answer or one typed error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        answer = Answer(send)
        exchange = scope["state"]["exchange"]
        try:
            await self._respond(scope, receive, answer)
        except ClientGone as gone:
            exchange["error"] = "cancelled"
            told = exchange["id"], exchange["client_id"], gone
            log.info("request %s (client id %r): %s", *told, extra=about(exchange))
        except ClientStalled:
            message = "the client read nothing of its answer for too long"
            error = ApiError("slow_consumer", message, status=408, retryable=False)
            await self._fail(answer, error, exchange, LAST_PATIENCE)
        except InvalidRequestError as error:
            await self._fail(answer, as_api_error(error), exchange)
        except ApiError as error:
            await self._fail(answer, error, exchange)
        except Exception as error:
            log.error("request %s failed inside", exchange["id"], exc_info=wordless(error), extra=about(exchange))
            sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
            await self._fail(answer, sorry, exchange)

    async def _fail(
        self, answer: Answer, error: ApiError, exchange: dict[str, str], patience: float = READ_PATIENCE
    ) -> None:
        error.request_id, exchange["error"] = exchange["id"], error.code
        told = exchange["id"], exchange["client_id"], error.status, error.code
        log.info("request %s (client id %r): %s %s", *told, extra=about(exchange))
        await answer.error(error, patience=patience)

    @abstractmethod
    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        """Answer a request; raises `ApiError`, `InvalidRequestError`, `ClientGone` or `ClientStalled`."""


class Endpoint(Responder):
    """A route whose requests are JSON and name a model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        exchange, visit = scope["state"]["exchange"], scope["state"]["visit"]
        body = await read_body(scope, receive, self._services.max_body_bytes, visit.deadline)
        await until_disconnect(receive, self._take(body, answer, exchange, visit), answer)

    async def _take(self, body: bytes, answer: Answer, exchange: dict[str, str], visit: Visit) -> None:
        """Find out which model is asked, and answer."""
        services = self._services
        fields = await services.off_loop.run(len(body), lambda: parse_json(body), visit.tenant.name)
        front = services.models.of(fields)
        exchange["model"] = front.model_id
        visit.ask(front.model_id, front.gate)
        await self._answer(Incoming(front, fields, len(body), exchange, visit), answer)

    async def _worked(self, incoming: Incoming, work: Callable[[Mapping[str, Any], ServedModel], T]) -> T:
        """Return what `work` makes of a request, which for long ones is done beside the event loop."""
        return await self._services.off_loop.run(
            incoming.num_bytes, lambda: work(incoming.fields, incoming.front.model), incoming.visit.tenant.name
        )

    @abstractmethod
    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        """Answer a request; raises `ApiError` or `InvalidRequestError`. Cancelled on hang-up."""
