"""Routes that clients of other servers ask for: scores and ranks, SageMaker's, lm-eval's tokenizer, the load.

Source: vLLM's server; Amazon SageMaker, "use your own inference code with hosting services".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope

from cluster.admission.tenants import Visit
from cluster.answer_log import ANSWER_LOG, AnswerFacts, AnswerLog
from cluster.errors import ApiError, as_api_error
from cluster.http.asgi import Answer, read_body, until_disconnect
from cluster.http.endpoints import Endpoint, Incoming, Responder, Services
from cluster.http.kept_answers import refuse_kept
from cluster.openai.body import parse_json
from cluster.openai.embeddings import embedded
from cluster.openai.scoring import ParseScoring, answer_body
from cluster.router.models import Models
from cluster.telemetry.tracing.semantics import HTTP_OPERATIONS
from engine.errors import InvalidRequestError

# Routes of OpenAI's and vLLM's servers, below /v1 or not, and what serves instead.
NOT_HERE: Mapping[str, str] = {
    "/pooling": "use /v1/embeddings, whose pooling may be last or mean",
    "/classify": "no model that classifies is served: ask for a choice, structured_outputs={'choice': [...]}",
    "/audio/transcriptions": "models here read and write text only",
    "/audio/translations": "models here read and write text only",
    "/audio/speech": "models here read and write text only",
    "/images/generations": "models here read and write text only",
    "/images/edits": "models here read and write text only",
    "/moderations": "no model that classifies is served",
    "/realtime": "use /v1/chat/completions with stream=true",
    "/assistants": "use /v1/responses",
    "/threads": "use /v1/responses with previous_response_id",
    "/conversations": "use /v1/responses with previous_response_id",
    "/load_lora_adapter": "adapters are not supported",
    "/unload_lora_adapter": "adapters are not supported",
    "/reset_prefix_cache": "prefixes of changed weights are forgotten by POST /sleep and /wake_up",
    "/start_profile": "use --otlp-traces-endpoint, /metrics and `squadron why`",
    "/stop_profile": "use --otlp-traces-endpoint, /metrics and `squadron why`",
    "/server_info": "use /ready, /version and `squadron status`",
}
# What a body of `/invocations` is for, by a field that only such have.
_MEANT = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "documents": "/v1/rerank",
    "text_1": "/v1/score",
}
PING, LOAD, TOKENIZER_INFO = "/ping", "/load", "/tokenizer_info"


class ScoringEndpoint(Endpoint):
    """`POST /v1/score` or `POST /v1/rerank`. All texts are embedded or the call fails."""

    def __init__(self, services: Services, parse: ParseScoring) -> None:
        super().__init__(services)
        self._parse = parse

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        front, visit = incoming.front, incoming.visit
        scoring = await self._worked(incoming, self._parse)
        call = scoring.embedding
        incoming.exchange["id"] = call.request_id
        incoming.report_ignored(call.ignored)
        await visit.charge_prompt(call.num_tokens)
        incoming.log.begin(AnswerFacts(call.request_id, 0, 0))
        track = front.metrics.track(call.requests, visit.charge_output)
        try:
            vectors = await embedded(call, visit.source, track)
        except InvalidRequestError as error:
            raise scoring.clients_error(error) from error
        await answer.json(200, answer_body(scoring, vectors, front.model_id))


class InvocationsEndpoint(Responder):
    """`POST /invocations`, SageMaker's one route: what the body holds says which one it is for.

    endpoints: by their paths. The model may be left out where there is only one.
    """

    def __init__(self, services: Services, endpoints: Mapping[str, Endpoint]) -> None:
        self._services = services
        self._endpoints = endpoints

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        refuse_kept(scope)
        state = scope["state"]
        visit = state["visit"]
        body = await read_body(scope, receive, self._services.max_body_bytes, visit.deadline)
        work = self._passed_on(body, answer, state["exchange"], visit, state[ANSWER_LOG])
        await until_disconnect(receive, work, answer)

    async def _passed_on(
        self, body: bytes, answer: Answer, exchange: dict[str, str], visit: Visit, log: AnswerLog
    ) -> None:
        """Have the endpoint answer that the body is for."""
        pool, models = self._services.thread_pool, self._services.models
        fields = await pool.run(len(body), lambda: parse_json(body), visit.tenant.name)
        path = next((path for name, path in _MEANT.items() if fields.get(name) is not None), None)
        if path is None:
            known = ", ".join(_MEANT)
            missing = f"the body must have one of {known}"
            raise ApiError("missing_required_parameter", missing, param="messages", status=400)
        if visit.context.trace is not None:
            visit.context.trace.operation = HTTP_OPERATIONS[path]
        if fields.get("model") is None:
            named = {**fields, "model": models.of(fields).model_id}
            body = await pool.run(len(body), lambda: json.encode(named), visit.tenant.name)
        await self._endpoints[path].take(body, answer, exchange, visit, log)


def compat_routes(models: Models, is_ready: Callable[[], bool]) -> list[Route]:
    """Return the routes that only tell something. is_ready: whether requests can be served."""

    async def ping(_: Request) -> Response:
        ready = is_ready()
        headers = {} if ready else {"retry-after": "1"}
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503, headers)

    async def load(request: Request) -> Response:
        if not request.state.tenant.sees_metrics:
            message = f"{LOAD} counts all tenants: it is for a key with admin: true, or that of --api-key"
            raise ApiError("permission_denied", message)
        return _json({"server_load": sum(one.admission.num_inside + one.admission.num_waiting for one in models)})

    async def tokenizer_info(request: Request) -> Response:
        try:
            front = models.of({"model": request.query_params.get("model")})
        except InvalidRequestError as error:
            raise as_api_error(error) from error
        return _json(front.model.tokenizer.info() | {"model_max_length": front.model.max_model_len})

    return [Route(PING, ping), Route(LOAD, load), Route(TOKENIZER_INFO, tokenizer_info)]


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.encode(body), status, headers, "application/json")
