"""A gateway before a router with a fake source, and a client of it: stubs, metadata, typed errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import grpc
from google.rpc import error_details_pb2, status_pb2
from starlette.applications import Starlette

from cluster.admission.tenants import Tenancy
from cluster.grpc_api.forwarded import ForwardedCalls
from cluster.grpc_api.gateway import ForwardingInterceptor, ForwardingService
from cluster.grpc_api.metrics import GrpcMetrics
from cluster.grpc_api.server import GrpcServer, ListenAddress
from cluster.grpc_api.service import GrpcServices
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_link import ExchangeServer
from cluster.ingress.router_pool import KnownRouter, RouterPool
from cluster.ingress.router_side import IngressCheck
from cluster.openai.served_model import ServedModel
from cluster.router.models import Models
from cluster.telemetry.metrics import Metrics
from tests.openai_app import front_for

LIMIT = 64 * 1024


@dataclass
class Told:
    """What a stream told: all of each choice, and how the call ended."""

    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    logprobs: list = field(default_factory=list)
    usage: pb.Usage | None = None

    @property
    def text(self) -> str:
        """The text of the only choice."""
        return self.texts[0]

    def add(self, response: pb.GenerateResponse | pb.ChatResponse) -> None:
        """Take the next response."""
        self.request_id = response.request_id or self.request_id
        for delta in response.deltas:
            text = delta.text if isinstance(delta, pb.GenerateDelta) else delta.content
            self.texts[delta.choice] = self.texts.get(delta.choice, "") + text
            self.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
            if delta.finish_reason:
                assert delta.choice not in self.reasons, "a choice ended twice"
                self.reasons[delta.choice] = delta.finish_reason
        if response.HasField("usage"):
            assert self.usage is None, "usage was told twice"
            self.usage = response.usage


async def gathered(call, on_response: Callable[[int], None] = lambda _: None) -> Told:
    """Read a stream to its end. on_response: hears how many responses have come."""
    told, count = Told(), 0
    while (response := await call.read()) is not grpc.aio.EOF:
        count += 1
        told.add(response)
        on_response(count)
    return told


@dataclass(frozen=True)
class Refusal:
    """An error as a client reads it from `google.rpc.Status` in the trailing metadata."""

    status: grpc.StatusCode
    code: str
    message: str
    param: str | None
    request_id: str
    retryable: bool
    retry_after: float | None

    @classmethod
    def of(cls, error: grpc.RpcError) -> Refusal:
        """Read the details; fails where there are none."""
        trailing = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        assert (status.code, status.message) == (error.code().value[0], error.details())
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.domain == "squadron"
        wait = retry.retry_delay.ToSeconds() if len(status.details) > 1 and status.details[1].Unpack(retry) else None
        if wait is not None:
            wait = retry.retry_delay.ToSeconds()
            assert trailing["retry-after"] == str(wait)
        told = info.metadata
        assert trailing["x-request-id"]
        return cls(
            error.code(),
            info.reason,
            status.message,
            told.get("param"),
            told["request_id"],
            told["retryable"] == "true",
            wait,
        )


async def refusal_of(call) -> Refusal:
    """Return how a call fails; an answer is the test's failure."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                continue
        else:
            await call
    except grpc.RpcError as error:
        return Refusal.of(error)
    raise AssertionError("the call was answered")


@dataclass
class Served:
    """A running server and how to reach it."""

    server: GrpcServer
    channel: grpc.aio.Channel
    metrics: Metrics

    @property
    def stub(self) -> InferenceStub:
        """The generated client."""
        return InferenceStub(self.channel)


@contextlib.asynccontextmanager
async def serving_grpc(
    source, model: ServedModel, tenancy: Tenancy | None = None, limit: int = LIMIT, **changes
) -> AsyncIterator[Served]:
    """Serve on a free loopback port with everything a test does not care about filled in."""
    metrics = Metrics()
    services = grpc_services(Models([front_for(source, model, metrics, **changes)]), metrics, tenancy, limit)
    async with running_grpc(services, metrics) as served:
        yield served


def grpc_services(
    models: Models, metrics: Metrics, tenancy: Tenancy | None = None, limit: int = LIMIT
) -> GrpcServices:
    """What a router answers calls with."""
    return GrpcServices(models, tenancy or Tenancy(), GrpcMetrics(metrics).answered, limit)


@contextlib.asynccontextmanager
async def running_grpc(services: GrpcServices, metrics: Metrics, **changes) -> AsyncIterator[Served]:
    """Serve on a free loopback port. changes: of the services."""
    services = replace(services, **changes)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(gateway_of(services))
        await server.start()
        stack.push_async_callback(server.stop, 0)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
            yield Served(server, channel, metrics)


@contextlib.asynccontextmanager
async def gateway_of(services: GrpcServices, port: int = 0) -> AsyncIterator[GrpcServer]:
    """A gateway's server, not started yet, before a router that has the services. port: 0 = any that is free."""
    exchanges = ExchangeServer(IngressCheck(ForwardedCalls(Starlette(), services)))
    pool = RouterPool("gateway", patience=10)
    holding = asyncio.create_task(pool.hold(KnownRouter("router", await exchanges.address("127.0.0.1"))))
    service = ForwardingService(RouterLossGuard(pool, gateway=True), lambda: pool.routers)
    door = ForwardingInterceptor(services.tenancy, service)
    try:
        yield GrpcServer(ListenAddress(port=port), service, door, services.max_message_bytes)
    finally:
        await exchanges.close()
        await holding
