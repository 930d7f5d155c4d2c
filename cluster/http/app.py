"""The ASGI app: routes, health, readiness, metrics. Mounted by Ray Serve, or by any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from msgspec import json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.admission.keys import Tenant
from cluster.admission.tenants import Tenancy
from cluster.batch.server.store import Store
from cluster.error_forms import COUNT_TOKENS, MESSAGES, MODELS, VERSION_HEADER, error_of, form_of
from cluster.errors import ApiError
from cluster.http.batch_routes import BatchRoutes, FileRoutes
from cluster.http.compat_routes import NOT_HERE, InvocationsEndpoint, ScoringEndpoint, compat_routes
from cluster.http.docs_page import openapi_page
from cluster.http.drain_route import DrainNode, drain_route
from cluster.http.endpoints import (
    EmbeddingsEndpoint,
    Endpoint,
    GenerationEndpoint,
    ResponsesEndpoint,
    Services,
    TokensEndpoint,
    detokenize,
    tokenize,
)
from cluster.http.gate import Gate
from cluster.http.kept_answers import InputItemsEndpoint, KeptChatEndpoint, KeptEndpoint, KeptResponseEndpoint
from cluster.http.messages import CountTokensEndpoint, MessagesEndpoint
from cluster.http.openapi import OPERATIONS, SERVED, openapi
from cluster.http.sites import Sites
from cluster.http.sleep_routes import sleep_routes
from cluster.http.storage import FileThreads, Stored
from cluster.http.ui import page_headers, ui_route
from cluster.openai.frames import ChatFrames, CompletionFrames
from cluster.openai.scoring import rerank_call, score_call
from cluster.openai.served_model import ServedModel
from cluster.openai.thread_pool import FairThreadPool
from cluster.openai.validation import parse_chat, parse_completion
from cluster.responses.copies import Copies
from cluster.responses.metrics import KeptAnswerCollector
from cluster.responses.store import ResponseStore
from cluster.router.metrics import TenantCollector
from cluster.router.models import ModelFront, Models
from cluster.router.sleeping import SleepingModel
from cluster.router.why import why
from cluster.telemetry.metrics import CONTENT_TYPE, Metrics

MAX_BODY_BYTES = 4 * 1024 * 1024
RESPONSE_RETENTION = 600.0
ReadyBody = Mapping[str, Any]


def build_app(
    models: Models,
    metrics: Metrics,
    ready: Callable[[], ReadyBody],
    *,
    tenancy: Tenancy | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    names_answers: bool = True,
    store: Store | None = None,
    sites: Sites | None = None,
    drain: DrainNode | None = None,
    response_retention: float = RESPONSE_RETENTION,
    copies: Copies | None = None,
    sleeping: Sequence[SleepingModel] | None = None,
    root_path: str | None = None,
) -> ASGIApp:
    """Return the OpenAI-compatible app.

    models: what it serves, each by its name. metrics: of the app. ready: the body of `/ready`; its `ready` says
    whether requests can be served (200, else 503 with `Retry-After`), the rest is for who runs the server. tenancy:
    keys and quotas; None = open to all. max_body_bytes: larger requests get a 413 before they are held.
    names_answers: False where what carries the app puts `x-request-id` on answers itself (Ray Serve does, and two
    would be one wrong value to clients). store: of files and batches; None = none are kept, and their routes say so.
    sites: names that the server goes by, and sites whose pages may use it; None = as on loopback. response_retention:
    seconds for which answers that are to be kept are, after their end; 0 = none is. copies: of them, for other
    routers; None = nobody has any.
    drain: announces that a node ends (`POST /drain`); None = there are no nodes. sleeping: puts each model to sleep;
    None = the server has no sleep mode. root_path: below which clients find it, as its document says.
    """
    tenancy = tenancy or Tenancy()
    metrics.register(TenantCollector(tenancy, models, metrics))
    services, stored = Services(models, FairThreadPool(), max_body_bytes), Stored(store)
    kept = ResponseStore(tenancy, response_retention, copies) if response_retention else None
    if kept is not None:
        metrics.register(KeptAnswerCollector(kept, metrics))
    routes = [
        *_endpoint_routes(services, kept),
        *FileRoutes(stored).routes(),
        *BatchRoutes(stored, services.thread_pool, max_body_bytes).routes(),
        *_model_routes(models),
        *_document_routes(tenancy.keyed, drain is not None, root_path),
        *_status_routes(metrics, models, ready),
        *compat_routes(models, lambda: bool(ready()["ready"])),
        *sleep_routes(models, sleeping),
        Route("/why/{name}", partial(_why, models)),
        ui_route(),
    ]
    if drain is not None:
        routes.append(drain_route(drain, tenancy.keyed))
    threads = (services.thread_pool, stored.threads)
    app = Starlette(routes=routes, lifespan=partial(_lifespan, tenancy, kept, threads), exception_handlers=_ERRORS)
    app.router.redirect_slashes = False
    return Gate(app, metrics, tenancy, names_answers, sites)


@asynccontextmanager
async def _lifespan(
    tenancy: Tenancy, kept: ResponseStore | None, threads: Sequence[FairThreadPool | FileThreads], _: Starlette
) -> AsyncGenerator[None, None]:
    """Watch the file of keys while the app runs, and end its threads with it."""
    watcher = asyncio.create_task(tenancy.watch())
    yield
    if kept is not None:
        kept.close()
    watcher.cancel()
    with suppress(asyncio.CancelledError):
        await watcher
    for each in threads:
        each.close()


def _endpoint_routes(services: Services, kept: ResponseStore | None) -> list[Route]:
    generating: dict[str, Endpoint] = {
        "/v1/completions": GenerationEndpoint(services, parse_completion, CompletionFrames),
        "/v1/chat/completions": GenerationEndpoint(services, parse_chat, ChatFrames),
        "/v1/responses": ResponsesEndpoint(services),
    }
    if kept is not None:
        kept.serve(generating)
    embedding: dict[str, Endpoint] = {
        "/v1/embeddings": EmbeddingsEndpoint(services),
        "/v1/score": ScoringEndpoint(services, score_call),
        "/v1/rerank": ScoringEndpoint(services, rerank_call),
    }
    endpoints: dict[str, ASGIApp] = {
        **{path: KeptEndpoint(one, services, path, kept) for path, one in generating.items()},
        **embedding,
        "/score": embedding["/v1/score"],
        **dict.fromkeys(("/rerank", "/v2/rerank"), embedding["/v1/rerank"]),
        "/invocations": InvocationsEndpoint(services, generating | embedding),
        MESSAGES: MessagesEndpoint(services),
        COUNT_TOKENS: CountTokensEndpoint(services),
        "/tokenize": TokensEndpoint(services, tokenize),
        "/detokenize": TokensEndpoint(services, detokenize),
    }
    one = "/v1/responses/{response_id}"
    return [
        *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
        Route("/v1/chat/completions/{completion_id}", KeptChatEndpoint(kept), methods=["DELETE"]),
        Route(one, KeptResponseEndpoint(kept), methods=["GET", "DELETE"]),
        Route(f"{one}/input_items", InputItemsEndpoint(services, kept), methods=["GET"]),
        Route(f"{one}/cancel", KeptResponseEndpoint(kept, cancels=True), methods=["POST"]),
    ]


async def _why(models: Models, request: Request) -> Response:
    return _json(await why([front.explain for front in models], request.path_params["name"], _asker(request)))


def _asker(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def _model_routes(models: Models) -> list[Route]:
    async def list_models(request: Request) -> Response:
        cards = [_card(front.model, name, request) for front in models for name in front.model.names]
        page = {}
        if VERSION_HEADER in request.headers:
            page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return _json({"object": "list", "data": cards, **page})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        return _json(_card(models.named(name).model, name, request))

    return [Route(MODELS, list_models), Route(f"{MODELS}/{{name:path}}", one_model)]


def _card(model: ServedModel, name: str, request: Request) -> dict[str, Any]:
    """What is told of a model; clients of Anthropic's API, which name its version, are told more."""
    more: dict[str, Any] = {}
    if VERSION_HEADER in request.headers:
        more = {"type": "model", "display_name": name, "created_at": _rfc_3339(model.created), "lifecycle": "active"}
        more |= {"max_input_tokens": model.max_model_len, "max_tokens": model.max_model_len}
    return {
        **more,
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "squadron",
        "root": model.model_id,
        "max_model_len": model.max_model_len,
    }


def _rfc_3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _document_routes(keyed: bool, drains: bool, root_path: str | None) -> list[Route]:
    @cache
    def document() -> bytes:
        return json.encode(openapi(OPERATIONS if drains else SERVED, keyed, root_path))

    async def show_document(_: Request) -> Response:
        return Response(document(), media_type="application/json")

    async def show_version(_: Request) -> Response:
        return _json({"version": version("squadron")})

    @cache
    def page() -> str:
        return openapi_page(openapi(OPERATIONS if drains else SERVED, keyed))

    async def show_page(_: Request) -> Response:
        return Response(page(), headers=page_headers(page()), media_type="text/html")

    return [Route("/openapi.json", show_document), Route("/docs", show_page), Route("/version", show_version)]


def _status_routes(metrics: Metrics, models: Models, ready: Callable[[], ReadyBody]) -> list[Route]:
    async def health(_: Request) -> Response:
        return _json({"status": "live"})

    async def is_ready(request: Request) -> Response:
        body, asked = ready(), request.query_params.get("model")
        if asked is not None:
            front = models.named(asked)
            body = {**body, **_of_model(body, front)}
        if not _asker(request).sees_metrics:
            body = {"ready": body["ready"]}
        return _json(body) if body["ready"] else _json(body, 503, {"retry-after": "1"})

    async def show_metrics(request: Request) -> Response:
        asker = _asker(request)
        text = metrics.render(None if asker.sees_metrics else asker.name)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return [Route("/health", health), Route("/ready", is_ready), Route("/metrics", show_metrics)]


def _of_model(body: ReadyBody, front: ModelFront) -> ReadyBody:
    """What `/ready` says of one model."""
    replicas = [replica for replica in body["replicas"] if replica["model"] == front.model_id]
    cold = [name for name in body["cold"] if name == front.model_id]
    ready = front.ready()
    if front.model_id in body.get("asleep", ()):
        asleep = {"asleep": [front.model_id]}
        return {"ready": False, "models": {front.model_id: False}, "cold": [], **asleep, "replicas": replicas}
    return {"ready": ready, "models": {front.model_id: ready}, "cold": cold, "replicas": replicas}


def _api_error(request: Request, error: Exception) -> Response:
    """A refusal of a route that is no endpoint."""
    if not isinstance(error, ApiError):
        raise error
    return _error(request, error)


def _http_error(request: Request, error: Exception) -> Response:
    """Routing's own refusals (404, 405) in the shape that all our errors have."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    instead = NOT_HERE.get(path.removeprefix("/v1"))
    if error.status_code == 405 and instead is None:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed here; use {allowed}"
        return _error(request, ApiError("method_not_allowed", message), dict(error.headers or {}))
    message = f"there is nothing at {path[:200]!r}; {instead or '/openapi.json lists what there is, /ui is a page'}"
    return _error(request, ApiError("not_found", message, status=404))


def _inside_error(request: Request, _: Exception) -> Response:
    """A failure that no endpoint expected; it is raised again, so that the ASGI server logs it."""
    return _error(request, ApiError("internal_error", "the server failed; its log has more"))


_ERRORS = {HTTPException: _http_error, ApiError: _api_error, Exception: _inside_error}


def _error(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    error.request_id = request.scope["state"]["exchange"]["id"]
    return _json(form_of(request.scope).body(error_of(error)), error.status, headers)


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.encode(body), status, headers, "application/json")
