"""`squadron.v1.Inference`: the calls of the HTTP API, through the same validator, keys and token source.

It keeps the calls that run, so that one call can end another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from cluster.admission.tenants import Tenancy, Visit
from cluster.answer_log import AnswerFacts, AnswerLog
from cluster.client_id import checked_session
from cluster.errors import ApiError
from cluster.grpc_api.protobuf import (
    ChatResponses,
    GenerateResponses,
    Responses,
    chat_fields,
    completion_fields,
    embedding_fields,
    parsed,
    shown,
    usage_message,
)
from cluster.grpc_api.rpc import Answered, Rpc, RpcContext, Traced, exchange
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.openai.call import Call
from cluster.openai.choices import TokenUsage
from cluster.openai.embeddings import EmbeddingCall, Vector, embedded, embedding_call, has_many
from cluster.openai.generation import Generation, built
from cluster.openai.served_model import ServedModel
from cluster.openai.thread_pool import FairThreadPool
from cluster.openai.validation import parse_chat, parse_completion
from cluster.router.models import ModelFront, Models
from cluster.router.replica_set import ReplicaView
from cluster.token_source import CallContext
from engine.errors import InvalidRequestError
from engine.request import Request


@dataclass(frozen=True, slots=True)
class GrpcServices:
    """What the service shares with the HTTP app, and what it reports of the cluster.

    answered: hears of each answer, by method, status and model. traced: begins the trace of a call; None = no traces.
    """

    models: Models
    tenancy: Tenancy
    answered: Answered
    max_message_bytes: int
    traced: Traced | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two ways to generate: its request, how it is checked, and its responses."""

    request: type[Message]
    fields: Callable[[Any], Mapping[str, Any]]
    parse: Callable[[Mapping[str, Any], ServedModel], Call]
    responses: type[Responses]


_GENERATE = _Kind(pb.GenerateRequest, completion_fields, parse_completion, GenerateResponses)
_CHAT = _Kind(pb.ChatRequest, chat_fields, parse_chat, ChatResponses)


class InferenceService:
    """One method for each of the `.proto`; requests come as bytes, so that our own words say what is wrong."""

    def __init__(self, services: GrpcServices) -> None:
        self._services = services
        self._thread_pool = FairThreadPool()
        self._live = LiveCalls()

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._thread_pool.close()

    async def Generate(self, body: bytes, context: RpcContext) -> None:
        """Continue a prompt."""
        await self._generate(_GENERATE, body, context)

    async def Chat(self, body: bytes, context: RpcContext) -> None:
        """Answer a conversation."""
        await self._generate(_CHAT, body, context)

    async def Embed(self, body: bytes, context: RpcContext) -> pb.EmbedResponse:
        """Turn texts into vectors."""
        async with self._exchange("Embed", context) as rpc, await self._visit(rpc) as visit:
            fields = await self._thread_pool.run(
                len(body), lambda: embedding_fields(parsed(pb.EmbedRequest, body)), visit.tenant.name
            )
            front = self._asked(fields, rpc, visit)
            call = await self._thread_pool.run(
                len(body), lambda: embedding_call(fields, front.model), visit.tenant.name
            )
            rpc.id, rpc.ignored = call.request_id, call.ignored
            rpc.log.begin(AnswerFacts(call.request_id, 0, 0))
            await visit.charge_prompt(call.num_tokens)
            track = front.metrics.track(call.requests, visit.charge_output)
            async with self._live.running(call.request_id, visit.tenant.name):
                vectors = await embedded(call, visit.source, track)
            if has_many(vectors):
                return await asyncio.to_thread(_embed_response, call, vectors)
            return _embed_response(call, vectors)

    async def Abort(self, body: bytes, context: RpcContext) -> pb.AbortResponse:
        """End a running request of the same tenant."""
        async with self._exchange("Abort", context) as rpc:
            tenant = self._services.tenancy.tenant_of(rpc.authorization)
            self._live.abort(parsed(pb.AbortRequest, body).request_id, tenant.name)
            return pb.AbortResponse()

    async def GetModelInfo(self, body: bytes, context: RpcContext) -> pb.GetModelInfoResponse:
        """Tell of a served model."""
        async with self._exchange("GetModelInfo", context) as rpc:
            request = parsed(pb.GetModelInfoRequest, body)
            front = self._services.models.of({"model": request.model or None})
            model, rpc.model = front.model, front.model_id
            return pb.GetModelInfoResponse(
                model=model.model_id,
                max_model_len=model.longest_sequence,
                vocab_size=model.vocab_size,
                created=model.created,
                eos_token_id=model.tokenizer.eos_token_id,
                has_chat_template=model.tokenizer.chat_template is not None,
                max_message_bytes=self._services.max_message_bytes,
            )

    async def Health(self, body: bytes, context: RpcContext) -> pb.HealthResponse:
        """Tell whether requests that come now are served. Needs a key only to ask for one model by its name."""
        async with self._exchange("Health", context) as rpc:
            asked = parsed(pb.HealthRequest, body).model
            models = self._services.models
            if asked:
                self._services.tenancy.tenant_of(rpc.authorization)
            if asked and asked not in models.names:
                raise ApiError("model_not_found", "The model does not exist.", param="model")
            fronts = [models.named(asked)] if asked else models
            return pb.HealthResponse(ready=any(front.ready() for front in fronts))

    async def GetLoad(self, body: bytes, context: RpcContext) -> pb.GetLoadResponse:
        """Tell what the replicas do now, of one model or of all."""
        async with self._exchange("GetLoad", context) as rpc:
            self._refuse_tenants(rpc)
            asked = parsed(pb.GetLoadRequest, body).model
            models = self._services.models
            fronts = [models.named(asked)] if asked else list(models)
            return pb.GetLoadResponse(
                replicas=[_replica_load(view, front.model_id) for front in fronts for view in front.replicas()],
                waiting=sum(front.admission.num_waiting for front in fronts),
                inside=sum(front.admission.num_inside for front in fronts),
            )

    async def _generate(self, kind: _Kind, body: bytes, context: RpcContext) -> None:
        method = "Generate" if kind is _GENERATE else "Chat"
        async with self._exchange(method, context) as rpc, await self._visit(rpc) as visit:
            fields, told = await self._thread_pool.run(len(body), lambda: _read(kind, body), visit.tenant.name)
            front = self._asked(fields, rpc, visit)
            call, requests = await self._thread_pool.run(
                len(body), lambda: built(kind.parse(fields, front.model), front.model, rpc.log), visit.tenant.name
            )
            rpc.id, rpc.client_id = call.request_id, rpc.client_id or call.client_id
            rpc.ignored = call.ignored
            await visit.charge_prompt(sum([len(request.prompt_token_ids) for request in requests]))
            responses = kind.responses(call, front.model.tokenizer, *told)
            async with self._live.running(call.request_id, visit.tenant.name):
                await _stream(front, call, requests, responses, visit, context, rpc.log)

    def _asked(self, fields: Mapping[str, Any], rpc: Rpc, visit: Visit) -> ModelFront:
        """Find out which model is asked."""
        front = self._services.models.of(fields)
        rpc.model = front.model_id
        visit.ask(front.model_id, front.admission)
        return front

    def _refuse_tenants(self, rpc: Rpc) -> None:
        """Raise `ApiError` (`permission_denied`) for a key that is not shown what others do."""
        tenant = self._services.tenancy.tenant_of(rpc.authorization)
        rpc.tenant = tenant.name
        if not tenant.sees_metrics:
            message = (
                "GetLoad tells what all tenants do, which is for a key with admin: true or scrape: true, or that of "
                "--metrics-key; Health tells whether requests are served"
            )
            raise ApiError("permission_denied", message)

    def _exchange(self, method: str, context: RpcContext) -> Any:
        return exchange(method, context, self._services.answered, self._services.traced)

    async def _visit(self, rpc: Rpc) -> Visit:
        tenancy = self._services.tenancy
        tenant = tenancy.tenant_of(rpc.authorization)
        rpc.tenant = tenant.name
        log = rpc.log
        session = checked_session(rpc.session)
        context = CallContext(session, fingerprint=log.fingerprint, continues=log.continues, trace=rpc.trace)
        return await tenancy.visit(tenant, rpc.deadline(), context, charged=log.facts is not None, log=log)


@dataclass(frozen=True, slots=True)
class _LiveCall:
    tenant: str
    scope: asyncio.Timeout


class LiveCalls:
    """Calls by the request id of their first response. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, _LiveCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def running(self, request_id: str, tenant: str) -> AsyncGenerator[None, None]:
        """Hold a call while it runs; raises `ApiError` (`aborted`) inside its task when it is aborted.

        A timeout that is set to now ends whatever the call waits for, which costs nothing for each token.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._calls[request_id] = _LiveCall(tenant, scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise ApiError("aborted", "the request was aborted by a call of Abort", status=499) from None
        finally:
            self._calls.pop(request_id, None)

    def abort(self, request_id: str, tenant: str) -> None:
        """End a call of `tenant`; raises `ApiError` (`not_found`), for those of others too."""
        call = self._calls.get(request_id)
        if call is None or call.tenant != tenant:
            message = f"no request {request_id[:100]!r} runs on this connection's router; it may have ended"
            raise ApiError("not_found", message, param="request_id")
        del self._calls[request_id]
        call.scope.reschedule(asyncio.get_running_loop().time())


async def _stream(
    front: ModelFront,
    call: Call,
    requests: Sequence[Request],
    responses: Responses,
    visit: Visit,
    context: RpcContext,
    log: AnswerLog,
) -> None:
    """Write what comes as it comes; a client that reads slowly delays only itself."""
    track = front.metrics.track(requests, visit.charge_output)
    generation = Generation(call, requests, front.model.tokenizer, visit.source, track, log)
    try:
        async with aclosing(generation.deltas()) as deltas:
            await context.write(responses.first())
            async for delta in deltas:
                response = responses.delta(delta)
                if response is not None:
                    await context.write(response)
        await context.write(responses.last(generation.usage))
    except (ApiError, InvalidRequestError) as error:
        raise call.clients_error(error) from error


def _read(kind: _Kind, body: bytes) -> tuple[Mapping[str, Any], tuple[bool, bool]]:
    """Return a request's fields, and whether text and token ids are returned."""
    message: Any = parsed(kind.request, body)
    told = shown(message)
    return kind.fields(message), told


def _embed_response(call: EmbeddingCall, vectors: Sequence[Vector]) -> pb.EmbedResponse:
    return pb.EmbedResponse(
        request_id=call.request_id,
        embeddings=[pb.Embedding(values=vector.tolist()) for vector in vectors],
        usage=usage_message(TokenUsage(call.num_tokens, 0, 0)),
    )


def _replica_load(view: ReplicaView, model_id: str) -> pb.ReplicaLoad:
    load = view.load
    return pb.ReplicaLoad(
        replica_id=view.replica_id,
        model=model_id,
        ready=view.ready,
        running=load.num_running,
        waiting=load.num_waiting,
        outstanding_tokens=load.outstanding_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_cached=load.kv_blocks_cached,
    )
