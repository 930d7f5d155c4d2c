"""The endpoints that generate or tokenize: each reads a bounded body, and ends in one answer or one typed error.

`POST /tokenize` and `POST /detokenize` have the shapes of vLLM's server.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import Raw, json
from starlette.types import Receive, Scope, Send

from cluster.admission.tenants import Visit
from cluster.answer_log import ANSWER_LOG, AnswerFacts, AnswerLog, Kept
from cluster.error_forms import form_of
from cluster.errors import ApiError, as_api_error
from cluster.http.asgi import READ_PATIENCE, Answer, ClientGone, ClientStalled, read_body, until_disconnect
from cluster.openai.body import checked_fields, parse_json
from cluster.openai.call import Call, Parse, PromptOptions, chat_ids, conversation_of
from cluster.openai.choices import Delta
from cluster.openai.embeddings import embedded, embedding_call, whole_answer
from cluster.openai.fields import Hints
from cluster.openai.frames import DONE, Frames
from cluster.openai.generation import MANY_LOGPROBS, Generation, built, whole_body
from cluster.openai.refusals import Refusal
from cluster.openai.request_fields import DetokenizeFields, TokenizeFields
from cluster.openai.response_input import ResponseCall, our_name, parse_response, renamed
from cluster.openai.response_output import ResponseWriter
from cluster.openai.served_model import ServedModel
from cluster.openai.thread_pool import FairThreadPool
from cluster.openai.validation import refuse_other_models
from cluster.router.models import ModelFront, Models
from cluster.telemetry.logs import about
from cluster.telemetry.metrics import NoTrack
from engine.errors import InvalidRequestError, redacted
from engine.request import Request

LAST_PATIENCE = 1.0  # seconds that the error may take on its way to a client that reads no more
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints share: the models, who tokenizes, and how much a client may send."""

    models: Models
    thread_pool: FairThreadPool
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose model is known.

    num_bytes: of its body. exchange: its ids and names, as of `Gate`. log: what is kept of its answer.
    """

    front: ModelFront
    fields: Mapping[str, Any]
    num_bytes: int
    exchange: dict[str, str]
    visit: Visit
    log: AnswerLog

    def built(self, call: Call) -> tuple[Call, list[Request]]:
        """Return a call and its requests with what its answer shows: as an earlier router has begun it, if one has.

        Raises `ApiError` (`model_changed`) where that one made something else of the request.
        """
        return built(call, self.front.model, self.log)

    def report_ignored(self, names: Sequence[str]) -> None:
        """Have the answer name fields of the request that had no use."""
        if names:
            self.exchange["ignored"] = ", ".join(names)


class Responder(ABC):
    """An ASGI application. Every call ends in one whole answer or one typed error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        answer = Answer(send, form_of(scope))
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
            await self._fail(receive, answer, error, exchange, LAST_PATIENCE)
        except InvalidRequestError as error:
            await self._fail(receive, answer, as_api_error(error), exchange)
        except ApiError as error:
            await self._fail(receive, answer, error, exchange)
        except asyncio.CancelledError:
            kept: Kept | None = scope["state"][ANSWER_LOG].kept
            if kept is None or kept.stopped_by is None or answer.is_whole:
                raise
            kept.error = kept.stopped_by
            await self._fail(receive, answer, kept.stopped_by, exchange)
        except Exception as error:
            log.error("request %s failed inside", exchange["id"], exc_info=redacted(error), extra=about(exchange))
            sorry = ApiError("internal_error", "the server failed; its log has more under this request id")
            await self._fail(receive, answer, sorry, exchange)

    async def _fail(
        self,
        receive: Receive,
        answer: Answer,
        error: ApiError,
        exchange: dict[str, str],
        patience: float = READ_PATIENCE,
    ) -> None:
        error.request_id, exchange["error"] = exchange["id"], error.code
        told = exchange["id"], exchange["client_id"], error.status, error.code
        log.info("request %s (client id %r): %s %s", *told, extra=about(exchange))
        if not answer.asked_whole:  # what comes next is more of the body, which nobody wants
            await answer.error(error, patience=patience)
            return
        with suppress(ClientGone, ClientStalled):
            await until_disconnect(receive, answer.error(error, patience=patience), answer)

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
        log = scope["state"][ANSWER_LOG]
        await until_disconnect(receive, self.take(body, answer, exchange, visit, log), answer)

    async def take(self, body: bytes, answer: Answer, exchange: dict[str, str], visit: Visit, log: AnswerLog) -> None:
        """Find out which model is asked, and answer."""
        services = self._services
        fields = await services.thread_pool.run(len(body), lambda: parse_json(body), visit.tenant.name)
        front = services.models.of(fields)
        exchange["model"] = front.model_id
        visit.ask(front.model_id, front.admission)
        await self._answer(Incoming(front, fields, len(body), exchange, visit, log), answer)

    async def _worked(self, incoming: Incoming, work: Callable[[Mapping[str, Any], ServedModel], T]) -> T:
        """Return what `work` makes of a request, which for long ones is done beside the event loop."""
        return await self._services.thread_pool.run(
            incoming.num_bytes, lambda: work(incoming.fields, incoming.front.model), incoming.visit.tenant.name
        )

    @abstractmethod
    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        """Answer a request; raises `ApiError` or `InvalidRequestError`. Cancelled on hang-up."""


class GenerationEndpoint(Endpoint):
    """`POST /v1/completions` or `POST /v1/chat/completions`, streaming and not."""

    def __init__(self, services: Services, parse: Parse, frames: type[Frames]) -> None:
        super().__init__(services)
        self._parse = parse
        self._frames = frames

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        model = incoming.front.model
        call, requests = await self._worked(incoming, partial(self._built, incoming))
        generation = await begun(incoming, call, requests)
        frames = self._frames(call, model.model_id, model.tokenizer, generation.prompts)
        try:
            async with aclosing(generation.deltas()) as deltas:
                if call.stream:
                    await _stream(call, generation, deltas, frames, answer)
                else:
                    await answer.json(200, await whole_body(call, generation, deltas, frames))
        except (ApiError, InvalidRequestError) as error:
            typed = call.clients_error(error)
            if incoming.log.kept is not None:
                incoming.log.kept.error = typed
            raise typed from error

    def _built(self, incoming: Incoming, fields: Mapping[str, Any], model: ServedModel) -> tuple[Call, list[Request]]:
        return incoming.built(self._parse(fields, model))


async def begun(incoming: Incoming, call: Call, requests: Sequence[Request]) -> Generation:
    """Charge the prompts and return what generates; the answer shows the call's id from here on."""
    front, visit, exchange = incoming.front, incoming.visit, incoming.exchange
    exchange["id"] = call.request_id
    exchange["client_id"] = exchange["client_id"] or call.client_id
    incoming.report_ignored(call.ignored)
    await visit.charge_prompt(sum([len(request.prompt_token_ids) for request in requests]))
    kept = incoming.log.kept
    if kept is not None:
        kept.on_begun()
    made_again = kept is not None and kept.coming is not None
    track = NoTrack() if made_again else front.metrics.track(requests, visit.charge_output)
    return Generation(call, requests, front.model.tokenizer, visit.source, track, incoming.log)


async def _stream(
    call: Call, generation: Generation, deltas: AsyncGenerator[Delta, None], frames: Frames, answer: Answer
) -> None:
    """Send frames as deltas come. Nothing is sent before the first: an early error still gets its status."""
    before, held = generation.usage, list[bytes]()
    async for delta in deltas:
        if call.continuous_usage:
            usage = generation.usage
            frames.report_usage(usage, replace(before, cached_tokens=usage.cached_tokens))
            before = usage
        if len(delta.logprobs) > (0 if call.params.whole_rows else MANY_LOGPROBS):
            held.append(await asyncio.to_thread(frames.delta, delta))
        else:
            held.append(frames.delta(delta))
        if not generation.catches_up:
            await answer.events(b"".join(held))
            held.clear()
    last = frames.usage(generation.usage) if call.include_usage else b""
    await answer.end(last + DONE)


class ResponsesEndpoint(Endpoint):
    """`POST /v1/responses`, streaming and not.

    One that the server keeps is a stream, whatever its client asked for: a whole body is what its last event holds.
    """

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        model = incoming.front.model
        asked, requests = await self._worked(incoming, partial(_built_response, incoming))
        call, kept = asked.call, incoming.log.kept
        generation = await begun(incoming, call, requests)
        writer = ResponseWriter(asked, model.model_id, model.tokenizer, kept)
        streams = call.stream or kept is not None
        try:
            if kept is not None and (kept.background or kept.coming is not None):
                await answer.events(writer.take())
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    writer.add(delta)
                    if streams and not generation.catches_up:
                        await answer.events(writer.take())
        except asyncio.CancelledError:
            if kept is None or kept.stopped_by is None or not answer.status:
                raise
            ended_by = kept.stopped_by
        except (ApiError, InvalidRequestError) as error:
            ended_by = call.clients_error(error)
            ended_by.param = None if ended_by.param is None else our_name(ended_by.param)
            if not answer.status:  # nothing was sent: the error gets its status
                raise ended_by from error
        else:
            body = writer.end(generation.usage)
            if streams:
                await answer.end(writer.take())
            else:
                await answer.json(200, json.encode(body))
            return
        ended_by.request_id = call.request_id
        if kept is not None:
            kept.error = ended_by
        writer.fail(ended_by)
        await answer.end(writer.take())


def _built_response(
    incoming: Incoming, fields: Mapping[str, Any], model: ServedModel
) -> tuple[ResponseCall, list[Request]]:
    try:
        asked = parse_response(fields, model, keeps=incoming.log.kept is not None)
        call, requests = incoming.built(asked.call)
        return replace(asked, call=call), requests
    except InvalidRequestError as error:
        raise renamed(error) from error


class EmbeddingsEndpoint(Endpoint):
    """`POST /v1/embeddings`. All inputs are embedded or the call fails: there is no answer in part."""

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        front, visit = incoming.front, incoming.visit
        call = await self._worked(incoming, embedding_call)
        incoming.exchange["id"] = call.request_id
        incoming.report_ignored(call.ignored)
        await visit.charge_prompt(call.num_tokens)
        incoming.log.begin(AnswerFacts(call.request_id, 0, 0))
        track = front.metrics.track(call.requests, visit.charge_output)
        vectors = await embedded(call, visit.source, track)
        await answer.json(200, await whole_answer(call, vectors, front.model_id))


Work = Callable[[Mapping[str, Any], ServedModel, Hints], dict[str, Any]]
_ENCODED_AT_ONCE = 4096  # tokens: other threads get no turn while one long text is encoded
REFUSED_TOKENIZE = {
    "chat_template": Refusal((), "the model's own template is used"),
    "mm_processor_kwargs": Refusal(),
    "text": Refusal((), "use prompt"),
}


def tokenize(fields: Mapping[str, Any], model: ServedModel, hints: Hints) -> dict[str, Any]:
    """Return the tokens of a prompt or a chat; raises `InvalidRequestError` or `ApiError` naming the field."""
    checked = checked_fields(TokenizeFields, fields, REFUSED_TOKENIZE, hints)
    refuse_other_models(checked.model or model.model_id, model)
    if (checked.prompt is None) == (checked.messages is None):
        raise InvalidRequestError("prompt or messages: exactly one of them must be given", "prompt")
    tokens = _prompt_tokens(checked, model) if checked.prompt is not None else _chat_tokens(checked, model, hints)
    strings = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": strings if checked.return_token_strs else None,
    }


def detokenize(fields: Mapping[str, Any], model: ServedModel, hints: Hints) -> dict[str, Any]:
    """Return the text of tokens; raises `InvalidRequestError` or `ApiError` naming the field."""
    checked = checked_fields(DetokenizeFields, fields, hints=hints)
    refuse_other_models(checked.model or model.model_id, model)
    tokens = checked.tokens
    if len(tokens) > model.max_model_len:
        raise InvalidRequestError(
            f"tokens may hold {model.max_model_len} ids, as this model's context does, not {len(tokens)}; send them "
            "in parts",
            "tokens",
        )
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        raise InvalidRequestError(f"tokens must be ids of this model (0 to {model.vocab_size - 1})", "tokens")
    return {"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)}


class TokensEndpoint(Endpoint):
    """Answers with what one function makes of the body."""

    def __init__(self, services: Services, work: Work) -> None:
        super().__init__(services)
        self._work = work

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        hints = Hints(incoming.front.model.strict_fields)
        body = await self._worked(incoming, lambda fields, model: _encoded(self._work(fields, model, hints)))
        incoming.report_ignored(hints.names)
        await answer.json(200, body)


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body whose lists may be of millions."""
    return json.encode({name: _in_parts(value) if isinstance(value, list) else value for name, value in body.items()})


def _in_parts(values: list[Any]) -> Raw:
    parts = [values[start : start + _ENCODED_AT_ONCE] for start in range(0, len(values), _ENCODED_AT_ONCE)]
    return Raw(b"[" + b",".join([json.encode(part)[1:-1] for part in parts]) + b"]")


def _prompt_tokens(checked: TokenizeFields, model: ServedModel) -> list[int]:
    for name in ("tools", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt"):
        if getattr(checked, name) is not None:
            raise InvalidRequestError(f"{name} is allowed only with messages", name)
    return model.tokenizer.encode(checked.prompt or "", add_special_tokens=checked.add_special_tokens is not False)


def _chat_tokens(checked: TokenizeFields, model: ServedModel, hints: Hints) -> list[int]:
    options = PromptOptions(add_special_tokens=checked.add_special_tokens is True)
    return chat_ids(conversation_of(checked, model, hints), options, model)
