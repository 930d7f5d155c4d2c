"""`squadron.v1.Inference`: the calls of the HTTP API, through the same validator, door and token source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from cluster.errors import ApiError
from cluster.fleet import ReplicaView
from cluster.grpc_api.exchange import Answered, Exchange, exchange
from cluster.grpc_api.live_calls import LiveCalls
from cluster.grpc_api.off_loop import OffLoop
from cluster.grpc_api.requests import chat_fields, completion_fields, embedding_fields, parsed, shown
from cluster.grpc_api.responses import ChatResponses, GenerateResponses, Responses, usage_message
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.metrics import Metrics
from cluster.openai.call import Call
from cluster.openai.deltas import Usage
from cluster.openai.embeddings import EmbeddingCall, embedded, embedding_call
from cluster.openai.generation import Generation
from cluster.openai.prompts import build_requests
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, parse_completion
from cluster.tenants.tenancy import Tenancy, Visit
from engine.errors import InvalidRequestError
from engine.request import Request


@dataclass(frozen=True, slots=True)
class GrpcServices:
    """What the service shares with the HTTP app, and what it tells of the cluster.

    ready: whether requests that come now are served. replicas: a snapshot. answered: hears of each answer, by method
    and status.
    """

    model: ServedModel
    tenancy: Tenancy
    metrics: Metrics
    ready: Callable[[], bool]
    replicas: Callable[[], Sequence[ReplicaView]]
    answered: Answered
    max_message_bytes: int


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
    """One method for each of the `.proto`; requests come as bytes, so that our own words tell what is wrong."""

    def __init__(self, services: GrpcServices) -> None:
        self._services = services
        self._off_loop = OffLoop()
        self._live = LiveCalls()

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._off_loop.close()

    async def Generate(self, body: bytes, context: grpc.aio.ServicerContext) -> None:
        """Continue a prompt."""
        await self._generate(_GENERATE, body, context)

    async def Chat(self, body: bytes, context: grpc.aio.ServicerContext) -> None:
        """Answer a conversation."""
        await self._generate(_CHAT, body, context)

    async def Embed(self, body: bytes, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        """Turn texts into vectors."""
        async with self._exchange("Embed", context) as rpc, await self._visit(rpc) as visit:
            call = await self._off_loop.run(len(body), lambda: self._embedding_call(body))
            rpc.id = call.request_id
            await visit.charge_prompt(call.num_tokens)
            track = self._services.metrics.track(call.num_tokens, len(call.requests), visit.charge_output)
            async with self._live.running(call.request_id, visit.tenant.name):
                vectors = await embedded(call, visit.source, track)
            self._services.metrics.prompt_tokens.inc(call.num_tokens)
            return pb.EmbedResponse(
                request_id=call.request_id,
                embeddings=[pb.Embedding(values=vector) for vector in vectors],
                usage=usage_message(Usage(call.num_tokens, 0, 0)),
            )

    async def Abort(self, body: bytes, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """End a running request of the same tenant."""
        async with self._exchange("Abort", context) as rpc:
            tenant = self._services.tenancy.tenant_of(rpc.authorization)
            self._live.abort(parsed(pb.AbortRequest, body).request_id, tenant.name)
            return pb.AbortResponse()

    async def GetModelInfo(self, body: bytes, context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        """Tell of the served model."""
        async with self._exchange("GetModelInfo", context):
            parsed(pb.GetModelInfoRequest, body)
            model = self._services.model
            return pb.GetModelInfoResponse(
                model=model.model_id,
                max_model_len=model.longest_sequence,
                vocab_size=model.vocab_size,
                created=model.created,
                eos_token_id=model.tokenizer.eos_token_id,
                has_chat_template=model.tokenizer.chat_template is not None,
                max_message_bytes=self._services.max_message_bytes,
            )

    async def Health(self, body: bytes, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        """Tell whether requests that come now are served."""
        async with self._exchange("Health", context):
            parsed(pb.HealthRequest, body)
            return pb.HealthResponse(ready=self._services.ready())

    async def GetLoad(self, body: bytes, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        """Tell what the replicas do now."""
        async with self._exchange("GetLoad", context):
            parsed(pb.GetLoadRequest, body)
            gate = self._services.tenancy.gate
            replicas = [_replica_load(view) for view in self._services.replicas()]
            return pb.GetLoadResponse(replicas=replicas, waiting=gate.num_waiting, inside=gate.num_inside)

    async def _generate(self, kind: _Kind, body: bytes, context: grpc.aio.ServicerContext) -> None:
        method = "Generate" if kind is _GENERATE else "Chat"
        async with self._exchange(method, context) as rpc, await self._visit(rpc) as visit:
            call, requests, told = await self._off_loop.run(len(body), lambda: self._accepted(kind, body))
            rpc.id, rpc.client_id = call.request_id, rpc.client_id or call.client_id
            await visit.charge_prompt(sum([len(request.prompt_token_ids) for request in requests]))
            responses = kind.responses(call, self._services.model.tokenizer, *told)
            async with self._live.running(call.request_id, visit.tenant.name):
                await self._stream(call, requests, responses, visit, context)

    async def _stream(
        self,
        call: Call,
        requests: Sequence[Request],
        responses: Responses,
        visit: Visit,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Write what comes as it comes; a client that reads slowly holds up nobody but itself."""
        services = self._services
        prompt_tokens = sum([len(request.prompt_token_ids) for request in requests])
        track = services.metrics.track(prompt_tokens, call.params.n * len(requests), visit.charge_output)
        generation = Generation(call, requests, services.model.tokenizer, visit.source, track)
        try:
            async with aclosing(generation.deltas()) as deltas:
                await context.write(responses.first())
                async for delta in deltas:
                    response = responses.delta(delta)
                    if response is not None:
                        await context.write(response)
            await context.write(responses.last(generation.usage))
        except (ApiError, InvalidRequestError) as error:
            if error.param == "structured":
                error.param = call.structured_param or "tools"
            raise

    def _accepted(self, kind: _Kind, body: bytes) -> tuple[Call, list[Request], tuple[bool, bool]]:
        """Check and tokenize a request."""
        message: Any = parsed(kind.request, body)
        told = shown(message)
        call = kind.parse(kind.fields(message), self._services.model)
        return call, build_requests(call, self._services.model), told

    def _embedding_call(self, body: bytes) -> EmbeddingCall:
        return embedding_call(embedding_fields(parsed(pb.EmbedRequest, body)), self._services.model)

    def _exchange(self, method: str, context: grpc.aio.ServicerContext) -> Any:
        return exchange(method, context, self._services.answered)

    async def _visit(self, rpc: Exchange) -> Visit:
        tenancy = self._services.tenancy
        return await tenancy.visit(tenancy.tenant_of(rpc.authorization), rpc.deadline())


def _replica_load(view: ReplicaView) -> pb.ReplicaLoad:
    load = view.load
    return pb.ReplicaLoad(
        replica_id=view.replica_id,
        ready=view.ready,
        running=load.num_running,
        waiting=load.num_waiting,
        outstanding_tokens=load.outstanding_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_cached=load.kv_blocks_cached,
    )
