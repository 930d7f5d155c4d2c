"""`POST /drain`, which a spot notice calls: announces to Ray that a node ends (`cluster.lifecycle.node_drains`).

An operator's key is needed, also where the server has none: whoever may call this may take all nodes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import json
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.errors import ApiError, as_api_error
from cluster.http.asgi import read_body
from cluster.openai.body import checked_fields, parse_json
from cluster.openai.fields import Fields
from engine.errors import InvalidRequestError, SquadronError

MOST_BYTES = 1 << 14  # of a body
MOST_SECONDS = 86_400
USUAL_SECONDS = 120.0  # that AWS gives; source: Amazon EC2 user guide, "Spot Instance interruption notices"
MOST_NAME = 256
DrainNode = Callable[[str, float], list[str]]  # name and seconds -> ids of what is drained; blocks


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MOST_NAME:
        raise PydanticCustomError(
            "node", f"must be the id, address or host name of a node, of 1 to {MOST_NAME} characters"
        )
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
        raise PydanticCustomError("seconds", f"must lie between 0 and {MOST_SECONDS} seconds")
    return float(value)


class DrainFields(Fields):
    """`POST /drain`."""

    node: Annotated[str, BeforeValidator(_name), WithJsonSchema({"type": "string"})] = Field(
        description="Ray's id of the node, its address, its host name, or the name it was given"
    )
    deadline: Annotated[
        float,
        BeforeValidator(_seconds),
        WithJsonSchema({"type": "number", "minimum": 0, "maximum": MOST_SECONDS}),
    ] = Field(default=USUAL_SECONDS, description="seconds until it ends")


def drain_route(drain: DrainNode, keyed: bool) -> Route:
    """Return the route. drain: as of `cluster.lifecycle.node_drains.drain`. keyed: whether the server has keys."""

    async def answer(request: Request) -> Response:
        if not keyed:
            raise ApiError("permission_denied", "/drain is for a server with keys; start it with --api-key")
        if not request.state.tenant.sees_all:
            raise ApiError("permission_denied", "/drain is for an operator's key, such as that of --api-key")
        try:
            asked = checked_fields(
                DrainFields, parse_json(await read_body(request.scope, request.receive, MOST_BYTES))
            )
            nodes = await asyncio.to_thread(drain, asked.node, asked.deadline)
        except InvalidRequestError as error:
            raise as_api_error(error) from error
        except SquadronError as error:
            raise ApiError("internal_error", str(error), status=503) from error
        return Response(json.encode({"nodes": nodes, "deadline": asked.deadline}), media_type="application/json")

    return Route("/drain", answer, methods=["POST"])
