"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API, whole and as a stream.

Source: Anthropic API reference, "versions" of the API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import json
from starlette.datastructures import Headers
from starlette.types import Receive, Scope
from typing_extensions import override

from cluster.anthropic.message_input import MessageCall, count_tokens, our_name, parse_messages, renamed, too_long
from cluster.anthropic.message_output import MessageWriter
from cluster.error_forms import VERSION_HEADER
from cluster.errors import ApiError
from cluster.http.asgi import Answer
from cluster.http.endpoints import Endpoint, Incoming, Services, TokensEndpoint, begun
from cluster.http.kept_answers import refuse_kept
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.request import Request

VERSION = "2023-06-01"  # since then streams are of named events
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class MessagesEndpoint(Endpoint):
    """`POST /v1/messages`."""

    @override
    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        _check_headers(scope)
        await super()._respond(scope, receive, answer)

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        asked, (request,) = await self._worked(incoming, partial(_built, incoming))
        call = asked.call
        generation = await begun(incoming, call, [request])
        writer = MessageWriter(asked, request, incoming.front.model_id)
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    if not writer.begun:
                        writer.begin(generation.usage)
                    writer.add(delta)
                    if call.stream and not generation.catches_up:
                        await answer.events(writer.take())
        except (ApiError, InvalidRequestError) as error:
            typed = call.clients_error(error)
            typed.param = None if typed.param is None else our_name(typed.param)
            raise typed from error
        body = writer.end(generation.usage)
        if call.stream:
            await answer.events(b"")
            await answer.end(writer.take())
        else:
            await answer.json(200, json.encode(body))


class CountTokensEndpoint(TokensEndpoint):
    """`POST /v1/messages/count_tokens`."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, count_tokens)

    @override
    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        _check_headers(scope)
        await super()._respond(scope, receive, answer)


def _check_headers(scope: Scope) -> None:
    """Raise `ApiError` (400) for a version whose messages looked otherwise, and for an answer that is to be kept."""
    refuse_kept(scope)
    version = Headers(scope=scope).get(VERSION_HEADER, VERSION)
    if not _DATE.fullmatch(version) or version < VERSION:
        message = f"{VERSION_HEADER} must be {VERSION} or a later date, not {version[:100]!r}"
        raise ApiError("unsupported_value", message, param=VERSION_HEADER)


def _built(incoming: Incoming, fields: Mapping[str, Any], model: ServedModel) -> tuple[MessageCall, list[Request]]:
    asked = parse_messages(fields, model)
    try:
        call, requests = incoming.built(asked.call)
    except InvalidRequestError as error:
        raise renamed(too_long(error, model), asked.origins) from error
    return replace(asked, call=call), requests
