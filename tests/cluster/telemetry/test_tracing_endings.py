"""What spans say of calls that did not end well: the code of the error, and whose fault it was."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress

import pytest
from opentelemetry.trace import StatusCode

from cluster.admission.keys import FixedKeys
from cluster.admission.tenants import Tenancy
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.http.request_spans import RouterTracing
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.models import Models
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.tracing import engine_spans
from cluster.telemetry.tracing import semantics as names
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.telemetry.tracing.provider import is_fault
from cluster.token_source import CallContext
from tests.cluster.cluster_lab import long_request, until
from tests.cluster.telemetry.tracing_lab import TRACE, TRACEPARENT, Spans, TracedLab, post, traced_client
from tests.engine.engine_driver import VOCAB
from tests.grpc_client import grpc_services, refusal_of, running_grpc
from tests.openai_app import MODEL, front_for, served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("changes", "headers", "status", "code"),
    [
        ({"max_tokens": "many"}, {}, 400, "invalid_type"),
        ({"model": "other"}, {}, 404, "model_not_found"),
        ({}, {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    ],
)
async def test_refused_calls_carry_their_code_and_are_no_faults(model, changes, headers, status, code):
    async with TracedLab() as lab, traced_client(lab, model, api_key="right") as client:
        answer = await post(client, headers={"authorization": "Bearer right"} | headers, **changes)
    assert answer.status_code == status
    span = lab.spans.one("POST /v1/completions")
    assert span.attributes[names.ERROR_TYPE] == code == answer.json()["error"]["code"]
    assert span.attributes[names.HTTP_RESPONSE_STATUS_CODE] == status
    assert span.status.status_code is StatusCode.UNSET
    assert lab.spans.named("attempt") == []


async def test_request_that_the_engine_refuses_carries_the_code_in_every_span(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a")
        answer = await post(client, prompt=[VOCAB + 5])
        await until(lambda: len(lab.spans.all()) == 4)
    code = answer.json()["error"]["code"]
    assert {one.attributes[names.ERROR_TYPE] for one in lab.spans.all()} == {code}
    assert {one.status.status_code for one in lab.spans.all()} == {StatusCode.UNSET}, "it is the client's fault"
    assert lab.spans.tree(lab.spans.one("attempt")) == ("attempt", ("queue",))


@pytest.mark.parametrize("code", ["", "cancelled", "invalid_type", "aborted", "draining", "drained", "slow_consumer"])
def test_what_a_client_or_a_drain_ends_is_no_fault(code):
    assert not is_fault(code)


@pytest.mark.parametrize("code", ["lost", "engine_dead", "closed", "given_up", "internal_error", "deadline_exceeded"])
def test_loss_of_a_replica_and_errors_of_5xx_are_faults(code):
    assert is_fault(code)


async def test_failure_of_ours_is_an_error(model):
    config = DispatcherConfig(no_replica_timeout=0.05)
    async with TracedLab(config) as lab, traced_client(lab, model) as client:
        await lab.begin("a", poison=6)
        answer = await post(client)
        await until(lambda: lab.spans.named("POST /v1/completions") != [])
    assert answer.status_code >= 500
    for name in ("POST /v1/completions", f"text_completion {MODEL}"):
        span = lab.spans.one(name)
        assert span.attributes[names.ERROR_TYPE] == answer.json()["error"]["code"]
        assert span.status.status_code is StatusCode.ERROR
    assert lab.spans.one("engine").attributes[names.ERROR_TYPE] == "engine_dead"


async def test_client_that_leaves_is_no_fault(model):
    async with TracedLab() as lab:
        await lab.begin("a", steps=3)
        trace = call_trace(lab.spans.tracing(), "POST /v1/completions", "text_completion", {}, {})
        chunks = lab.dispatcher.generate(long_request("r"), CallContext(trace=trace))
        await anext(chunks)
        await chunks.aclose()
        lab.alive["a"].executor.allow(100)
        await until(lambda: len(lab.spans.named("decode")) == 1)
    for name in ("text_completion", "attempt"):
        span = lab.spans.one(name)
        assert span.attributes[names.ERROR_TYPE] == "cancelled"
        assert span.status.status_code is StatusCode.UNSET
    assert lab.spans.one("decode").attributes[names.FINISH_REASONS] == ("abort",)


@pytest.mark.parametrize(
    ("status", "ending", "error", "failed"),
    [
        (200, asyncio.CancelledError(), "cancelled", False),
        (200, RuntimeError("broken"), "internal_error", True),
        (0, RuntimeError("broken"), "internal_error", True),
        (0, None, "cancelled", False),
        (500, None, None, True),
        (200, None, None, False),
    ],
)
async def test_call_whose_app_is_cancelled_or_breaks_ends_its_span_with_that(status, ending, error, failed):
    async def app(scope, receive, send):
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})
        if ending is not None:
            raise ending

    async def heard(message):
        assert message["status"] == status

    spans = Spans()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with suppress(type(ending)) if ending is not None else nullcontext():
        await RouterTracing(spans.tracing()).app(app)(scope, None, heard)
    span = spans.one("POST /v1/completions")
    assert span.attributes.get(names.ERROR_TYPE) == error
    assert (span.status.status_code is StatusCode.ERROR) is failed


async def test_spans_that_cannot_be_made_end_neither_replica_nor_request(model, monkeypatch, caplog):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        replica = await lab.begin("a")
        monkeypatch.setattr(engine_spans, "_attributes", lambda *_: 1 / 0)
        for _ in range(2):
            answer = await post(client)
            assert (answer.status_code, "[DONE]" in answer.text) == (200, True)
        await until(lambda: replica.core.num_requests == 0)
        assert replica.core.dead_reason is None
        assert len(lab.spans.named("attempt")) == 2
    assert any("its spans could not be made" in one.getMessage() for one in caplog.records)


async def test_call_without_a_key_is_traced_at_both_ingresses(model):
    """It is what a client with a wrong key looks for."""
    async with TracedLab() as lab:
        metrics, tenancy = Metrics(), Tenancy(FixedKeys.one("right"))
        async with traced_client(lab, model, api_key="right") as client:
            answer = await post(client, headers={"traceparent": TRACEPARENT})
        services = grpc_services(Models([front_for(lab.dispatcher, model, metrics)]), metrics, tenancy)
        async with running_grpc(services, metrics, traced=RouterTracing(lab.spans.tracing()).rpc) as served:
            call = served.stub.Chat(pb.ChatRequest(model=MODEL), metadata=(("traceparent", TRACEPARENT),))
            refusal = await refusal_of(call)
            trailing = dict(await call.trailing_metadata())
            await refusal_of(served.channel.unary_unary("/squadron.v1.Inference/Nothing")(b""))
    over_http, over_grpc = lab.spans.named("POST /v1/completions") + lab.spans.named("squadron.v1.Inference/Chat")
    assert answer.status_code == over_http.attributes[names.HTTP_RESPONSE_STATUS_CODE] == 401
    assert over_grpc.attributes[names.RPC_RESPONSE_STATUS_CODE] == refusal.status.name == "UNAUTHENTICATED"
    assert trailing["traceresponse"] == f"00-{TRACE}-{over_grpc.context.span_id:016x}-01"
    for span in (over_http, over_grpc):
        assert span.attributes[names.ERROR_TYPE] == "invalid_api_key"
        assert span.status.status_code is not StatusCode.ERROR
    assert len(lab.spans.all()) == 2, "methods that do not exist are not traced"
