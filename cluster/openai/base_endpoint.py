"""What all endpoints do alike: read a bounded body, and end in one whole answer or one typed error."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, from_invalid_request
from cluster.generation import TokenSource
from cluster.metrics import Metrics
from cluster.openai.http import Answer, ClientGone, read_body, until_disconnect
from cluster.openai.prompts import RequestBuilder
from cluster.openai.served_model import ServedModel
from cluster.tenants.tenancy import Visit
from engine.errors import InvalidRequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints share: the model, where tokens come from, who tokenizes, who counts."""

    model: ServedModel
    source: TokenSource
    builder: RequestBuilder
    metrics: Metrics
    max_body_bytes: int


class Endpoint(ABC):
    """An ASGI application for one route. Every call ends in one whole answer or one typed error."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        answer = Answer(send)
        exchange = scope["state"]["exchange"]
        try:
            visit: Visit = scope["state"]["visit"]
            body = await read_body(scope, receive, self._services.max_body_bytes, visit.deadline)
            await until_disconnect(receive, self._answer(body, answer, exchange, visit))
        except ClientGone:
            log.info("request %s (client id %r): the client hung up", exchange["id"], exchange["client_id"])
        except InvalidRequestError as error:
            await self._fail(answer, from_invalid_request(error), exchange)
        except ApiError as error:
            await self._fail(answer, error, exchange)
        except Exception:
            log.exception("request %s failed inside", exchange["id"])
            sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
            await self._fail(answer, sorry, exchange)

    async def _fail(self, answer: Answer, error: ApiError, exchange: dict[str, str]) -> None:
        error.request_id = exchange["id"]
        log.info("request %s (client id %r): %s %s", exchange["id"], exchange["client_id"], error.status, error.code)
        await answer.error(error)

    @abstractmethod
    async def _answer(self, body: bytes, answer: Answer, exchange: dict[str, str], visit: Visit) -> None:
        """Answer a request whose body is there; raises `ApiError` or `InvalidRequestError`. Cancelled on hang-up."""
