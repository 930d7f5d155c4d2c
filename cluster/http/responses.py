"""`POST /v1/responses`, streaming and not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from msgspec import json

from cluster.errors import ApiError
from cluster.http.base_endpoint import Endpoint, Incoming
from cluster.http.exchange import Answer
from cluster.openai.call import Call
from cluster.openai.deltas import Delta
from cluster.openai.generation import Generation
from cluster.openai.prompts import build_requests
from cluster.openai.responses.parse import Asked, our_name, parse_response, renamed
from cluster.openai.responses.writer import ResponseWriter
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.request import Request


class ResponsesEndpoint(Endpoint):
    """`POST /v1/responses`. A response is complete in its answer; the server keeps nothing of it."""

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        front, visit, exchange = incoming.front, incoming.visit, incoming.exchange
        asked, requests = await self._worked(incoming, _built)
        call = asked.call
        exchange["id"] = call.request_id
        exchange["client_id"] = exchange["client_id"] or call.client_id
        incoming.tell_ignored(call.ignored)
        prompt_tokens = sum([len(request.prompt_token_ids) for request in requests])
        await visit.charge_prompt(prompt_tokens)
        track = front.metrics.track(requests, visit.charge_output)
        generation = Generation(call, requests, front.model.tokenizer, visit.source, track)
        writer = ResponseWriter(asked, front.model_id, front.model.tokenizer)
        async with aclosing(generation.deltas()) as deltas:
            if call.stream:
                await _stream(generation, deltas, writer, answer, call)
            else:
                await _whole(generation, deltas, writer, answer, call)


def _built(fields: Mapping[str, Any], model: ServedModel) -> tuple[Asked, list[Request]]:
    try:
        asked = parse_response(fields, model)
        return asked, build_requests(asked.call, model)
    except InvalidRequestError as error:
        raise renamed(error) from error


async def _whole(
    generation: Generation, deltas: AsyncGenerator[Delta, None], writer: ResponseWriter, answer: Answer, call: Call
) -> None:
    try:
        async for delta in deltas:
            writer.add(delta)
    except (ApiError, InvalidRequestError) as error:
        raise _named(error, call) from error
    await answer.json(200, json.encode(writer.end(generation.usage)))


async def _stream(
    generation: Generation, deltas: AsyncGenerator[Delta, None], writer: ResponseWriter, answer: Answer, call: Call
) -> None:
    """Send events as deltas come. Nothing is sent before the first: an early error still gets its status."""
    try:
        async for delta in deltas:
            writer.add(delta)
            await answer.events(writer.take())
    except (ApiError, InvalidRequestError) as error:
        named = _named(error, call)
        if not answer.status:
            raise named from error
        named.request_id = call.request_id
        writer.fail(named)
        await answer.end(writer.take())
        return
    writer.end(generation.usage)
    await answer.end(writer.take())


def _named(error: ApiError | InvalidRequestError, call: Call) -> ApiError:
    """Return an error of the engine by the client's name of the field."""
    typed = call.clients_error(error)
    typed.param = None if typed.param is None else our_name(typed.param)
    return typed
