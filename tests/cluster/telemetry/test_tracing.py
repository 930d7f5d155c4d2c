"""Traces: one for a request, joined from the client's span to the engine's phases, and none where none is wanted."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.http.gate import RootPath
from cluster.http.request_spans import RouterTracing
from cluster.router.models import Models
from cluster.router.replica_handle import LiveRequest
from cluster.router.token_log import TokenLog
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.tracing import semantics as names
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.token_source import CallContext
from tests.cluster.cluster_lab import long_request, until
from tests.cluster.telemetry.tracing_lab import (
    BODY,
    CALLER,
    TRACE,
    TRACEPARENT,
    Spans,
    TracedLab,
    post,
    traced_client,
)
from tests.grpc_client import gathered, grpc_services, refusal_of, running_grpc
from tests.openai_app import MODEL, app_for, client_for, front_for, saying, served_model

SLACK = 100_000  # nanoseconds: each side's offset of the wall clock is taken for itself
PHASES = (("queue",), ("prefill",), ("decode",))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def test_streamed_request_is_one_trace_with_all_spans_joined(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a")
        answer = await post(client, headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
        assert answer.status_code == 200
        await until(lambda: len(lab.spans.all()) == 6)
    spans = lab.spans
    ingress = spans.one("POST /v1/completions")
    assert spans.tree(ingress) == (
        "POST /v1/completions",
        (f"text_completion {MODEL}", ("attempt", *PHASES)),
    )
    assert {f"{one.context.trace_id:032x}" for one in spans.all()} == {TRACE}
    assert f"{ingress.parent.span_id:016x}" == CALLER
    assert ingress.kind is SpanKind.SERVER
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{ingress.context.span_id:016x}-01"
    assert {one.context.trace_state["vendor"] for one in spans.all()} == {"1"}
    assert {one.status.status_code for one in spans.all()} == {StatusCode.UNSET}


async def test_what_is_below_a_root_path_is_traced_as_without_one(model):
    spans = Spans()
    app = RouterTracing(spans.tracing()).app(app_for(saying(model, "hi"), model))
    async with client_for(RootPath(app, "/llm")) as client:
        assert (await post(client, "/llm/v1/completions")).status_code == 200
    spans.one("POST /v1/completions")


async def test_spans_lie_within_their_parents_and_phases_leave_no_gap(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a", pace=0.002)
        await post(client)
        await until(lambda: len(lab.spans.all()) == 6)
    spans = lab.spans
    for parent in spans.all():
        for child in spans.children(parent):
            assert parent.start_time - SLACK <= child.start_time <= child.end_time <= parent.end_time + SLACK
    queue, prefill, decode = spans.children(spans.one("attempt"))
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    phases = sum(one.end_time - one.start_time for one in (queue, prefill, decode))
    attempt = spans.one("attempt")
    assert phases == decode.end_time - queue.start_time
    assert 11 * 2_000_000 < phases <= attempt.end_time - attempt.start_time + SLACK


async def test_spans_tell_what_was_asked_and_what_came(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a")
        answer = await post(
            client, temperature=0.5, top_p=0.9, top_k=7, seed=11, n=2, headers={"x-request-id": "mine"}
        )
        await until(lambda: len(lab.spans.all()) == 6)
    spans = lab.spans
    request_id = answer.text.split('"id":"')[1].split('"')[0]
    told = spans.one(f"text_completion {MODEL}").attributes
    assert told[names.PROVIDER_NAME] == "squadron"
    assert told[names.REQUEST_MODEL] == told[names.RESPONSE_MODEL] == MODEL
    assert told[names.RESPONSE_ID] == request_id
    assert (told[names.REQUEST_TEMPERATURE], told[names.REQUEST_TOP_P], told[names.REQUEST_TOP_K]) == (0.5, 0.9, 7)
    assert told[names.REQUEST_SEED] == 11
    assert (told[names.REQUEST_MAX_TOKENS], told[names.REQUEST_CHOICE_COUNT]) == (12, 2)
    assert (told[names.USAGE_INPUT_TOKENS], told[names.USAGE_OUTPUT_TOKENS]) == (5, 24)
    assert told[names.RESPONSE_FINISH_REASONS] == ("length", "length")
    assert 0 < told[names.RESPONSE_TIME_TO_FIRST_CHUNK] < 10
    assert told[names.DEVICE_SECONDS] > 0
    assert told[names.MIGRATIONS] == 0
    ingress = spans.one("POST /v1/completions").attributes
    assert (ingress[names.REQUEST_ID], ingress[names.CLIENT_REQUEST_ID]) == (request_id, "mine")
    assert (ingress[names.HTTP_RESPONSE_STATUS_CODE], ingress[names.HTTP_ROUTE]) == (200, "/v1/completions")
    decode = spans.one("decode").attributes
    assert (decode[names.DECODED_TOKENS], decode[names.REPLICA_ID]) == (24, "a")
    assert decode[names.FINISH_REASONS] == ("length", "length")
    assert spans.one("prefill").attributes[names.COMPUTED_TOKENS] == 5
    assert spans.one("decode").resource.attributes[names.ROLE] == "replica"


async def test_lost_replica_shows_as_a_second_attempt_linked_to_the_first(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        first = await lab.begin("a", steps=4)
        task = asyncio.create_task(post(client))
        # Counted where the router has them: what a replica has computed may be lost with it.
        await until(lambda: first.executor.executed >= 4 and lab.dispatcher.counters.tokens > 0)
        await lab.begin("b")
        lab.kill("a")
        assert (await task).status_code == 200
        await until(lambda: lab.spans.named("decode") != [])
    spans = lab.spans
    request = spans.one(f"text_completion {MODEL}")
    lost, second = spans.named("attempt")
    assert [one.name for one in spans.children(request)] == ["attempt", "migrate", "attempt"]
    assert len({one.context.trace_id for one in spans.all()}) == 1
    assert (lost.attributes[names.ERROR_TYPE], lost.status.status_code) == ("lost", StatusCode.ERROR)
    assert [one.name for one in spans.children(lost)] in ([], ["engine"]), "who was killed tells of no phase"
    assert second.links[0].context.span_id == lost.context.span_id
    assert (second.attributes[names.REPLICA_ID], second.attributes[names.ATTEMPT_NUMBER]) == ("b", 2)
    assert second.attributes[names.ATTEMPT_RESUMED_TOKENS] > 0
    assert spans.tree(second) == ("attempt", *PHASES)
    assert "replica a is lost" in spans.one("migrate").attributes[names.REASON]
    assert request.attributes[names.MIGRATIONS] == 1
    assert request.status.status_code is StatusCode.UNSET
    assert (
        spans.one("prefill").attributes[names.COMPUTED_TOKENS] == 5 + second.attributes[names.ATTEMPT_RESUMED_TOKENS]
    )


async def test_wait_for_a_replica_and_for_a_turn_are_spans(model):
    async with TracedLab() as lab:
        admission = AdmissionQueue(lab.dispatcher, lambda: 1)
        async with traced_client(lab, model, admission=admission) as client:
            tasks = [asyncio.create_task(post(client)) for _ in range(2)]
            await until(lambda: admission.num_waiting == 1 and lab.dispatcher.queue().requests == 1)
            await lab.begin("a")
            await asyncio.gather(*tasks)
            await until(lambda: len(lab.spans.named("decode")) == 2)
    spans = lab.spans
    first, second = spans.named(f"text_completion {MODEL}")
    assert [one.name for one in spans.children(first)] == ["replica wait", "attempt"]
    assert [one.name for one in spans.children(second)] == ["turn", "attempt"]


async def test_request_that_never_gets_its_turn_shows_how_long_it_waited(model):
    async with TracedLab() as lab:
        admission = AdmissionQueue(lab.dispatcher, lambda: 1, AdmissionConfig(max_wait=0.05))
        async with traced_client(lab, model, admission=admission) as client:
            first = asyncio.create_task(post(client))
            await until(lambda: lab.dispatcher.queue().requests == 1)
            refused = await post(client)
            await lab.begin("a")
            await first
    assert refused.status_code == 429
    spans = lab.spans
    (ingress,) = [one for one in spans.named("POST /v1/completions") if names.ERROR_TYPE in one.attributes]
    assert spans.tree(ingress)[1] == (f"text_completion {MODEL}", ("turn",))
    (request,) = spans.children(ingress)
    assert request.attributes[names.ERROR_TYPE] == "overloaded"
    assert request.status.status_code is StatusCode.UNSET
    (turn,) = spans.children(request)
    assert turn.end_time - turn.start_time >= 50_000_000 - SLACK


def test_refusal_of_a_replica_that_drains_is_no_migration():
    """Nothing ran there: `squadron_migrations_total` does not count it, either."""
    spans = Spans()
    trace = call_trace(spans.tracing(), "call", "chat", {}, {})
    live = LiveRequest(TokenLog(long_request("r"), None), 0.0, CallContext(trace=trace))
    told = live.trace
    for replica, why in (("a", "draining"), ("b", "lost"), ("c", "")):
        live.begin_attempt_trace(replica)
        told.sent()
        told.attempt_over(why)
        if why == "lost":
            told.moves("replica b is lost")
    live.end_trace()
    assert len(spans.named("attempt")) == 3
    assert spans.one("chat").attributes[names.MIGRATIONS] == 1


async def test_preemption_is_a_span_within_its_phase(model):
    async with TracedLab(max_num_seqs=4) as lab, traced_client(lab, model) as client:
        await lab.begin("a", num_blocks=9)
        await asyncio.gather(*[post(client, max_tokens=20, temperature=1) for _ in range(3)])
        await until(lambda: len(lab.spans.named("attempt")) == len(lab.spans.named("decode")) == 3)
    spans = lab.spans
    assert spans.named("preempted")
    for one in spans.named("preempted"):
        (phase,) = [parent for parent in spans.all() if parent.context.span_id == one.parent.span_id]
        assert phase.name in ("prefill", "decode")
        assert phase.start_time <= one.start_time <= one.end_time <= phase.end_time
    told = [phase.attributes[names.PREEMPTIONS] for phase in spans.named("decode")]
    assert sum(told) >= len(spans.named("preempted")) > 0


async def test_unsampled_parent_gives_no_spans_and_nothing_to_the_replica(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        replica = await lab.begin("a")
        answer = await post(client, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
        await until(lambda: replica.core.num_requests == 0)
    assert lab.spans.all() == []


@pytest.mark.parametrize(("sampler", "spans"), [("always_off", 0), ("parentbased_always_on", 6)])
async def test_sampler_of_the_standard_is_heard(model, monkeypatch, sampler, spans):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    async with TracedLab() as lab, traced_client(lab, model) as client:
        replica = await lab.begin("a")
        await post(client)
        await until(lambda: replica.core.num_requests == 0 and len(lab.spans.all()) == spans)


async def test_probes_and_pages_are_not_traced(model):
    spans = Spans()
    async with client_for(RouterTracing(spans.tracing()).app(app_for(saying(model, "a"), model))) as client:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200
        await client.post("/tokenize", json={"model": MODEL, "prompt": "a"})
    assert spans.all() == []


async def test_prompt_and_answer_are_in_no_span(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a")
        await client.post("/v1/completions", json={**BODY, "prompt": "SECRETPROMPT", "stop": ["SECRETSTOP"]})
        await client.post("/v1/completions", json={**BODY, "prompt": "SECRETPROMPT", "user": "SECRETUSER", "no": 1})
        answer = await post(client, stop=["SECRETSTOP"])
        await until(lambda: len(lab.spans.named("decode")) == 2)
    text = "".join(one.to_json() for one in lab.spans.all())
    assert "SECRET" not in text
    assert "[5, 6, 7" not in text
    assert answer.status_code == 200


async def test_grpc_call_is_traced_as_an_http_one(model):
    async with TracedLab() as lab:
        await lab.begin("a")
        metrics = Metrics()
        services = grpc_services(Models([front_for(lab.dispatcher, model, metrics)]), metrics)
        traced = RouterTracing(lab.spans.tracing()).rpc
        async with running_grpc(services, metrics, traced=traced) as served:
            request = pb.GenerateRequest(
                model=MODEL, prompt_token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.Sampling(max_tokens=4)
            )
            call = served.stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
            await gathered(call)
            trailing = dict(await call.trailing_metadata())
            refused_call = served.stub.Generate(pb.GenerateRequest(model="other", prompt="a"))
            bad = await refusal_of(refused_call)
            trailing_bad = dict(await refused_call.trailing_metadata())
            await served.stub.Health(pb.HealthRequest())
            await until(lambda: len(lab.spans.all()) == 7)
    good, refused = lab.spans.named("squadron.v1.Inference/Generate")
    assert f"{good.parent.span_id:016x}" == CALLER
    assert lab.spans.tree(good)[1] == (f"text_completion {MODEL}", ("attempt", *PHASES))
    assert trailing["traceresponse"] == f"00-{TRACE}-{good.context.span_id:016x}-01"
    assert good.attributes[names.RPC_RESPONSE_STATUS_CODE] == "OK"
    assert refused.attributes[names.ERROR_TYPE] == bad.code == "model_not_found"
    assert refused.attributes[names.RPC_RESPONSE_STATUS_CODE] == bad.status.name
    ids = f"00-{refused.context.trace_id:032x}-{refused.context.span_id:016x}-"
    assert trailing_bad["traceresponse"].startswith(ids), "a refusal is what one looks for most"
    assert good.attributes[names.TENANT] == refused.attributes[names.TENANT] == "default"


async def test_an_invocation_is_traced_as_what_it_is_for(model):
    async with TracedLab() as lab, traced_client(lab, model) as client:
        await lab.begin("a")
        assert (await post(client, "/invocations")).status_code == 200
        await until(lambda: len(lab.spans.all()) == 6)
    ingress = lab.spans.one("POST /invocations")
    assert lab.spans.tree(ingress) == ("POST /invocations", (f"text_completion {MODEL}", ("attempt", *PHASES)))
