"""`POST /v1/completions` and `POST /v1/chat/completions`, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from cluster.errors import ApiError
from cluster.http.base_endpoint import Endpoint, Incoming, Services
from cluster.http.exchange import Answer
from cluster.openai.call import Call
from cluster.openai.deltas import Delta
from cluster.openai.frames import DONE, ChatFrames, CompletionFrames, Frames
from cluster.openai.generation import MANY_LOGPROBS, Generation
from cluster.openai.prompts import Parse, build_requests
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, parse_completion
from cluster.openai.whole import whole_body
from engine.errors import InvalidRequestError
from engine.request import Request


class GenerationEndpoint(Endpoint):
    """An ASGI application for one of the two routes."""

    def __init__(self, services: Services, parse: Parse, frames: type[Frames]) -> None:
        super().__init__(services)
        self._parse = parse
        self._frames = frames

    @classmethod
    def completions(cls, services: Services) -> GenerationEndpoint:
        """Return the endpoint for plain completions."""
        return cls(services, parse_completion, CompletionFrames)

    @classmethod
    def chat(cls, services: Services) -> GenerationEndpoint:
        """Return the endpoint for chat completions."""
        return cls(services, parse_chat, ChatFrames)

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        front, visit, exchange = incoming.front, incoming.visit, incoming.exchange
        call, requests = await self._worked(incoming, self._built)
        exchange["id"] = call.request_id
        exchange["client_id"] = exchange["client_id"] or call.client_id
        incoming.tell_ignored(call.ignored)
        prompt_tokens = sum([len(request.prompt_token_ids) for request in requests])
        await visit.charge_prompt(prompt_tokens)
        track = front.metrics.track(requests, visit.charge_output)
        generation = Generation(call, requests, front.model.tokenizer, visit.source, track)
        frames = self._frames(call, front.model_id, front.model.tokenizer, generation.prompts)
        async with _clients_names(call), aclosing(generation.deltas()) as deltas:
            if call.stream:
                await self._stream(call, generation, deltas, frames, answer)
            else:
                await answer.json(200, await whole_body(call, generation, deltas, frames))

    def _built(self, fields: Mapping[str, Any], model: ServedModel) -> tuple[Call, list[Request]]:
        call = self._parse(fields, model)
        return call, build_requests(call, model)

    async def _stream(
        self,
        call: Call,
        generation: Generation,
        deltas: AsyncGenerator[Delta, None],
        frames: Frames,
        answer: Answer,
    ) -> None:
        """Send frames as deltas come. Nothing is sent before the first: an early error still gets its status."""
        before = generation.usage
        async for delta in deltas:
            if call.continuous_usage:
                usage = generation.usage
                frames.tell_usage(usage, replace(before, cached_tokens=usage.cached_tokens))
                before = usage
            if len(delta.logprobs) > MANY_LOGPROBS:
                await answer.events(await asyncio.to_thread(frames.delta, delta))
            else:
                await answer.events(frames.delta(delta))
        last = frames.usage(generation.usage) if call.include_usage else b""
        await answer.end(last + DONE)


@asynccontextmanager
async def _clients_names(call: Call) -> AsyncGenerator[None, None]:
    """Errors name the field that the client sent, whatever the engine calls it."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        raise call.clients_error(error) from error
