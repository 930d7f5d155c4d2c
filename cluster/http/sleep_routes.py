"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, as vLLM has them: replicas give memory back for a time.

An operator's key is needed for the first two: whoever may call them may stop the server. Without
`--enable-sleep-mode` all three say how they are had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from msgspec import json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.errors import ApiError, as_api_error
from cluster.openai.body import checked_fields
from cluster.openai.fields import Fields, note
from cluster.router.models import Models
from cluster.router.sleeping import SleepingModel
from engine.errors import InvalidRequestError
from engine.worker.sleep import TAGS

SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
OF_MODEL = "one of several models; default: all"


class AsleepQuery(Fields):
    """The query of `GET /is_sleeping`."""

    model: str | None = note(OF_MODEL)


class SleepQuery(Fields):
    """The query of `POST /sleep`."""

    level: Literal[1, 2] = note(
        "1: weights stay in the host's memory; 2: they are read again at waking. A CPU frees the KV cache alone at 1",
        default=1,
    )
    mode: Literal["wait", "abort", "keep"] | None = note(
        "what runs: let it finish first, end it, or go on with it after waking; default: 409 while anything runs"
    )
    model: str | None = note(OF_MODEL)


class WakeQuery(Fields):
    """The query of `POST /wake_up`."""

    tags: list[Literal["weights", "kv_cache"]] | None = note("once for each part to wake; default: both")
    model: str | None = note(OF_MODEL)


Q = TypeVar("Q", bound=Fields)


def sleep_routes(models: Models, sleeping: Sequence[SleepingModel] | None) -> list[Route]:
    """Return the routes. sleeping: each model's part; None = the server was started without sleep mode."""
    if sleeping is None:
        return [
            Route(SLEEP, _off, methods=["POST"]),
            Route(WAKE_UP, _off, methods=["POST"]),
            Route(IS_SLEEPING, _off),
        ]

    def meant(name: str | None) -> list[SleepingModel]:
        wanted = None if name is None else models.named(name).model_id
        return [one for one in sleeping if wanted in (None, one.model_id)]

    async def sleep(request: Request) -> Response:
        _check_operator(request)
        asked = _query(request, SleepQuery)
        chosen = meant(asked.model)
        await asyncio.gather(*(one.sleep(asked.level, asked.mode or "") for one in chosen))
        return _json({"status": "sleeping", "level": asked.level, "models": _told(chosen)})

    async def wake_up(request: Request) -> Response:
        _check_operator(request)
        asked = _query(request, WakeQuery)
        chosen = meant(asked.model)
        await asyncio.gather(*(one.wake_up(asked.tags or TAGS) for one in chosen))
        status = "sleeping" if any(one.is_sleeping for one in chosen) else "awake"
        return _json({"status": status, "tags": asked.tags, "models": _told(chosen)})

    async def is_sleeping(request: Request) -> Response:
        chosen = meant(_query(request, AsleepQuery).model)
        return _json({"is_sleeping": any(one.is_sleeping for one in chosen), "models": _told(chosen)})

    return [
        Route(SLEEP, sleep, methods=["POST"]),
        Route(WAKE_UP, wake_up, methods=["POST"]),
        Route(IS_SLEEPING, is_sleeping),
    ]


async def _off(request: Request) -> Response:
    message = f"{request.url.path} is there where the server was started with --enable-sleep-mode, and --api-key"
    raise ApiError("not_found", message)


def _check_operator(request: Request) -> None:
    if not request.state.tenant.sees_all:
        message = f"{request.url.path} is for an operator's key, such as that of --api-key"
        raise ApiError("permission_denied", message)


def _query(request: Request, schema: type[Q]) -> Q:
    """Return the query of a request; raises `ApiError` naming the first wrong parameter."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name == "tags":
            given.setdefault(name, []).append(value)
        else:
            given[name] = int(value) if name == "level" and value in ("1", "2") else value
    try:
        return checked_fields(schema, given)
    except InvalidRequestError as error:
        raise as_api_error(error) from error


def _told(models: Sequence[SleepingModel]) -> dict[str, Any]:
    return {one.model_id: one.public() for one in models}


def _json(body: dict[str, Any]) -> Response:
    return Response(json.encode(body), media_type="application/json")
