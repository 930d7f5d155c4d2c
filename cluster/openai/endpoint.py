"""`POST /v1/completions` and `POST /v1/chat/completions`, streaming and not."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, from_invalid_request
from cluster.generation import TokenSource
from cluster.metrics import Metrics
from cluster.openai.call import Call
from cluster.openai.collected import Collected
from cluster.openai.deltas import Delta
from cluster.openai.frames import DONE, ChatFrames, CompletionFrames, Frames
from cluster.openai.generation import Generation
from cluster.openai.http import Answer, ClientGone, read_body, until_disconnect
from cluster.openai.prompts import Parse, RequestBuilder
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, parse_completion
from cluster.tenants.tenancy import Visit
from engine.errors import InvalidRequestError

log = logging.getLogger("squadron.openai")


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints share: the model, where tokens come from, who tokenizes, who counts."""

    model: ServedModel
    source: TokenSource
    builder: RequestBuilder
    metrics: Metrics
    max_body_bytes: int


class GenerationEndpoint:
    """An ASGI application for one of the two routes. Every call ends in one whole answer or one typed error."""

    def __init__(self, services: Services, parse: Parse, frames: type[Frames]) -> None:
        self._services = services
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        answer = Answer(send)
        exchange = scope["state"]["exchange"]
        try:
            body = await read_body(scope, receive, self._services.max_body_bytes)
            await until_disconnect(receive, self._answer(body, answer, exchange, scope["state"]["visit"]))
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

    async def _answer(self, body: bytes, answer: Answer, exchange: dict[str, str], visit: Visit) -> None:
        services = self._services
        call, requests = await services.builder.build(self._parse, body)
        exchange["id"] = call.request_id
        exchange["client_id"] = exchange["client_id"] or call.client_id
        prompt_tokens = sum([len(request.prompt_token_ids) for request in requests])
        await visit.charge_prompt(prompt_tokens)
        track = services.metrics.track(prompt_tokens, call.params.n * len(requests), visit.charge_output)
        generation = Generation(call, requests, services.model.tokenizer, visit.source, track)
        frames = self._frames(call, services.model.model_id, services.model.tokenizer, generation.prompts)
        async with _clients_names(call), aclosing(generation.deltas()) as deltas:
            if call.stream:
                await self._stream(call, generation, deltas, frames, answer)
            else:
                await self._whole(generation, deltas, frames, answer)

    async def _stream(
        self,
        call: Call,
        generation: Generation,
        deltas: AsyncGenerator[Delta, None],
        frames: Frames,
        answer: Answer,
    ) -> None:
        """Send frames as deltas come. Nothing is sent before the first: an early error still gets its status."""
        async for delta in deltas:
            if call.continuous_usage:
                frames.tell_usage(generation.usage)
            await answer.events(frames.delta(delta))
        usage = frames.usage(generation.usage) if call.include_usage else b""
        await answer.end(usage + DONE)

    async def _whole(
        self, generation: Generation, deltas: AsyncGenerator[Delta, None], frames: Frames, answer: Answer
    ) -> None:
        collected = [Collected() for _ in range(generation.num_choices)]
        async for delta in deltas:
            collected[delta.choice].add(delta)
        choices = [frames.choice(i, *one.whole(i)) for i, one in enumerate(collected)]
        await answer.json(200, frames.body(choices, generation.usage))


@asynccontextmanager
async def _clients_names(call: Call) -> AsyncGenerator[None, None]:
    """Errors name the field that the client sent: the engine knows only `structured`, whatever it came from."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        if error.param == "structured":
            error.param = call.structured_param or "tools"
        raise
