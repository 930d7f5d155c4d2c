"""What the gRPC service refuses, by the field's name and before it costs anything; keys; and limits."""

import asyncio
import time

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from starlette.applications import Starlette

from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Quota, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.errors import STATUS_BY_CODE, ApiError
from cluster.grpc_api.gateway import ForwardingInterceptor, ForwardingService
from cluster.grpc_api.protobuf import parsed
from cluster.grpc_api.rpc import status_code
from cluster.grpc_api.server import GrpcServer, ListenAddress
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.router.replica_set import ReplicaView
from cluster.wire.parts import Load
from engine.errors import ConfigError, InvalidRequestError
from tests.grpc_client import LIMIT, gathered, refusal_of, serving_grpc
from tests.openai_app import MODEL, saying, served_model

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def ask(prompt="hi", **sampling):
    return pb.GenerateRequest(model=MODEL, prompt=prompt, sampling=pb.Sampling(**sampling))


def chat(*contents, **more):
    messages = [pb.Message(role="user", content=content) for content in contents]
    return pb.ChatRequest(model=MODEL, messages=messages, **more)


def keys(**tenants):
    """A door for which the key of each tenant is its name."""
    entries = [KeyEntry(hash_key(name), Tenant(name, quota)) for name, quota in tenants.items()]
    return FixedKeys(KeyRing(entries))


def door(**tenants):
    return Tenancy(keys(**tenants))


def bearing(key):
    return {"metadata": [("authorization", f"Bearer {key}")]}


NAN, INFINITY = float("nan"), float("inf")
IDS = pb.TokenIds
WRONG = {
    "no model": (pb.GenerateRequest(prompt="hi"), INVALID, "model"),
    "other model": (pb.GenerateRequest(model="gpt", prompt="hi"), MISSING, "model"),
    "no prompt": (pb.GenerateRequest(model=MODEL), INVALID, "prompt"),
    "empty prompt": (ask(""), INVALID, "prompt"),
    "no ids": (pb.GenerateRequest(model=MODEL, prompt_token_ids=IDS()), INVALID, "prompt"),
    "id too large": (pb.GenerateRequest(model=MODEL, prompt_token_ids=IDS(ids=[2**32 - 1])), INVALID, "prompt"),
    "prompt too long": (ask("word " * 2000), INVALID, "prompt"),
    "n": (ask(n=129), INVALID, "n"),
    "n of none": (ask(n=0), INVALID, "n"),
    "n of 2**63": (ask(n=2**63 - 1), INVALID, "n"),
    "temperature": (ask(temperature=-0.1), INVALID, "temperature"),
    "temperature nan": (ask(temperature=NAN), INVALID, "temperature"),
    "temperature inf": (ask(temperature=INFINITY), INVALID, "temperature"),
    "top_p": (ask(top_p=0.0), INVALID, "top_p"),
    "top_k": (ask(top_k=-2), INVALID, "top_k"),
    "min_p": (ask(min_p=1.1), INVALID, "min_p"),
    "repetition": (ask(repetition_penalty=0), INVALID, "repetition_penalty"),
    "presence": (ask(presence_penalty=2.1), INVALID, "presence_penalty"),
    "frequency nan": (ask(frequency_penalty=NAN), INVALID, "frequency_penalty"),
    "logprobs": (ask(logprobs=21), INVALID, "logprobs"),
    "stops": (ask(stop=["x"] * 17), INVALID, "stop"),
    "long stop": (ask(stop=["x" * 257]), INVALID, "stop"),
    "empty stops": (ask(stop=[""] * 17), INVALID, "stop"),
    "stop ids": (ask(stop_token_ids=[10**6]), INVALID, "stop_token_ids"),
    "allowed ids": (ask(allowed_token_ids=[10**6]), INVALID, "allowed_token_ids"),
    "biases": (ask(logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, "logit_bias"),
    "bias nan": (ask(logit_bias={1: NAN}), INVALID, "logit_bias"),
    "bias id": (ask(logit_bias={10**6: 1.0}), INVALID, "logit_bias"),
    "max_tokens": (ask(max_tokens=0), INVALID, "max_tokens"),
    "min over max": (ask(min_tokens=5, max_tokens=2), INVALID, "min_tokens"),
    "nothing structured": (
        ask(structured_outputs=pb.StructuredOutputs()),
        INVALID,
        "structured_outputs",
    ),
    "output": (pb.GenerateRequest(model=MODEL, prompt="hi", output=9), INVALID, "output"),
    "priority": (pb.GenerateRequest(model=MODEL, prompt="hi", priority=2**40), INVALID, "priority"),
    "salt": (pb.GenerateRequest(model=MODEL, prompt="hi", cache_salt="x" * 257), INVALID, "cache_salt"),
    "label": (pb.GenerateRequest(model=MODEL, prompt="hi", request_id="a b"), INVALID, "request_id"),
    "no messages": (chat(), INVALID, "messages"),
    "messages without end": (pb.ChatRequest(model=MODEL, messages=[pb.Message()] * 4097), INVALID, "messages"),
    "inputs without end": (
        pb.EmbedRequest(model=MODEL, token_ids=pb.TokenIdLists(lists=[pb.TokenIds()] * 4097)),
        INVALID,
        "token_ids.lists",
    ),
    "role": (pb.ChatRequest(model=MODEL, messages=[pb.Message(role="me", content="x")]), INVALID, "messages[0].role"),
    "no content": (pb.ChatRequest(model=MODEL, messages=[pb.Message(role="user")]), INVALID, "messages[0].content"),
    "chat logprobs": (chat("hi", sampling=pb.Sampling(logprobs=21)), INVALID, "logprobs"),
    "tool schema": (chat("hi", tools=[pb.Tool(name="f", parameters="{")]), INVALID, "tools[0].parameters"),
    "tool choice": (chat("hi", tool_choice=pb.ToolChoice(mode="required")), INVALID, "tool_choice"),
    "no input": (pb.EmbedRequest(model=MODEL), INVALID, "input"),
    "empty input": (pb.EmbedRequest(model=MODEL, texts=pb.Texts(texts=["a", ""])), INVALID, "input[1]"),
    "pooling": (pb.EmbedRequest(model=MODEL, texts=pb.Texts(texts=["a"]), pooling="max"), INVALID, "pooling"),
    "nobody to abort": (pb.AbortRequest(request_id="cmpl-none"), MISSING, "request_id"),
}
METHODS = {
    pb.GenerateRequest: "Generate",
    pb.ChatRequest: "Chat",
    pb.EmbedRequest: "Embed",
    pb.AbortRequest: "Abort",
}


@pytest.fixture(scope="module")
def loop_source(model):
    return saying(model, "fine")


@pytest.mark.parametrize("case", WRONG)
async def test_bad_input_is_refused_by_the_fields_name(model, loop_source, case):
    request, status, param = WRONG[case]
    asked = len(loop_source.requests)
    async with serving_grpc(loop_source, model) as served:
        began = time.perf_counter()
        refusal = await refusal_of(getattr(served.stub, METHODS[type(request)])(request))
        seconds = time.perf_counter() - began
    assert (refusal.status, refusal.param) == (status, param), refusal
    assert refusal.message
    assert not refusal.retryable
    assert seconds < 5, "it waited for something"
    assert len(loop_source.requests) == asked, "it cost the engine something"


async def raw(served, body, method="Generate"):
    call = served.channel.unary_stream(f"/squadron.v1.Inference/{method}")(body)
    return await refusal_of(call)


async def test_bytes_that_are_no_request_are_refused_in_our_words(model):
    async with serving_grpc(saying(model, "a"), model) as served:
        cut = await raw(served, b"\x0a\xff")
        surrogate = await raw(served, b"\x0a\x04demo\x12\x03\xed\xa0\x80")
        broken = await raw(served, b"\x0a\x04demo\x12\x02\xff\xfe")
    for refusal in (cut, surrogate, broken):
        assert (refusal.status, refusal.code) == (INVALID, "invalid_protobuf")


async def test_a_field_of_a_newer_client_is_refused_and_not_dropped(model):
    nested = pb.GenerateRequest(model=MODEL, prompt="hi").SerializeToString() + b"\x22\x03\xf8\x07\x01"
    async with serving_grpc(saying(model, "a"), model) as served:
        top = await raw(served, b"\x0a\x04demo\x12\x02hi" + b"\xf8\x07\x01")
        inner = await raw(served, nested)
    assert (top.status, top.code, top.param) == (INVALID, "unknown_parameter", "127")
    assert (inner.status, inner.code, inner.param) == (INVALID, "unknown_parameter", "sampling.127")


async def test_millions_of_fields_that_nobody_knows_cost_no_time_and_need_no_key(model):
    """Each of them would be an object. `Health` has no key, and is answered on the event loop."""
    body = b"\xa8\x06\x01" * 1_390_000
    began = time.thread_time()
    with pytest.raises(InvalidRequestError, match="HealthRequest has fields that this server does not know"):
        parsed(pb.HealthRequest, body)
    assert time.thread_time() - began < 0.25
    async with serving_grpc(saying(model, "a"), model, door(a=Quota()), limit=len(body)) as served:
        refusal = await raw(served, body, "Health")
    assert (refusal.status, refusal.code, refusal.param) == (INVALID, "unknown_parameter", None)


async def test_lists_within_lists_hold_so_many_messages_together(model):
    """Two bytes each, they would take 250 times their size in memory."""
    calls = [pb.ToolCall()] * 4096
    request = chat(*["x"] * 16)
    for message in request.messages:
        message.tool_calls.extend(calls)
    async with serving_grpc(saying(model, "a"), model, limit=10**6) as served:
        refusal = await refusal_of(served.stub.Chat(request))
    assert (refusal.status, refusal.param) == (INVALID, "messages[15].tool_calls")


@pytest.mark.parametrize("schema", ['{"\\ud800": 1}', '{"a":' * 900 + "1" + "}" * 900], ids=["surrogate", "nested"])
async def test_schemas_are_read_as_http_reads_them(model, schema):
    async with serving_grpc(saying(model, "a"), model) as served:
        refusal = await refusal_of(served.stub.Chat(chat("hi", tools=[pb.Tool(name="f", parameters=schema)])))
    assert (refusal.status, refusal.code, refusal.param) == (INVALID, "invalid_json", "tools[0].parameters")


@pytest.mark.parametrize(("over", "accepted"), [(-1, True), (0, True), (1, False)])
async def test_a_message_at_the_limit_is_read_and_one_byte_more_is_not(tmp_path, over, accepted):
    model = served_model(tmp_path, max_model_len=10**6)
    request = pb.GenerateRequest(model=MODEL, prompt="")
    # Tag, three bytes of length, and the prompt itself.
    request.prompt = "x" * (LIMIT + over - request.ByteSize() - 2)
    assert request.ByteSize() == LIMIT + over
    async with serving_grpc(saying(model, "fine"), model) as served:
        if accepted:
            assert (await gathered(served.stub.Generate(request))).text == "fine"
            return
        with pytest.raises(grpc.RpcError) as caught:
            await gathered(served.stub.Generate(request))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await gathered(served.stub.Generate(ask()))).text == "fine"


async def test_compressed_messages_are_refused_before_they_grow(model):
    async with serving_grpc(saying(model, "fine"), model) as served:
        call = served.stub.Generate(ask("a" * 50_000), compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.RpcError) as caught:
            await gathered(call)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_each_method_but_health_needs_a_key(model):
    source = saying(model, "fine")
    async with serving_grpc(source, model, door(team=Quota())) as served:
        stub = served.stub
        calls = {
            "Generate": lambda **key: stub.Generate(ask(), **key),
            "Chat": lambda **key: stub.Chat(chat("hi"), **key),
            "Embed": lambda **key: stub.Embed(pb.EmbedRequest(model=MODEL, texts=pb.Texts(texts=["a"])), **key),
            "Abort": lambda **key: stub.Abort(pb.AbortRequest(request_id="x"), **key),
            "GetModelInfo": lambda **key: stub.GetModelInfo(pb.GetModelInfoRequest(), **key),
            "GetLoad": lambda **key: stub.GetLoad(pb.GetLoadRequest(), **key),
            "Nothing": lambda **key: served.channel.unary_unary("/squadron.v1.Inference/Nothing")(b"", **key),
            "Other": lambda **key: served.channel.unary_unary("/other.Service/Call")(b"", **key),
        }
        assert set(calls) >= {one.name for one in pb.DESCRIPTOR.services_by_name["Inference"].methods} - {"Health"}
        for name, call in calls.items():
            for key in ({}, bearing("wrong"), {"metadata": [("authorization", "team")]}):
                refusal = await refusal_of(call(**key))
                assert (refusal.status, refusal.code) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"), name
        assert (await stub.Health(pb.HealthRequest())).ready
        for name in (MODEL, "another"):
            refusal = await refusal_of(stub.Health(pb.HealthRequest(model=name)))
            assert refusal.status == grpc.StatusCode.UNAUTHENTICATED, "nobody learns which models there are"
        assert (await stub.Health(pb.HealthRequest(model=MODEL), **bearing("team"))).ready
        assert (await gathered(calls["Generate"](**bearing("team")))).text == "fine"
        assert not source.requests[1:], "a call without a key reached the source"


async def test_load_is_told_to_admins_and_scrapers_alone(model):
    source = saying(model, "fine")
    entries = [
        KeyEntry(hash_key("team"), Tenant("team")),
        KeyEntry(hash_key("admin"), Tenant("operations", sees_all=True)),
        KeyEntry(hash_key("scraper"), Tenant("prometheus", scrapes=True)),
    ]
    load = Load(3, 1, 40, 100, 60, 10, 0, 0, 0, 0, 0, 0.0)
    view = ReplicaView("r1", 1, False, True, 3, 0.1, load)
    tenancy = Tenancy(FixedKeys(KeyRing(entries)))
    async with serving_grpc(source, model, tenancy, replicas=lambda: [view]) as served:
        for request in (pb.GetLoadRequest(), pb.GetLoadRequest(model=MODEL), pb.GetLoadRequest(model="none")):
            refusal = await refusal_of(served.stub.GetLoad(request, **bearing("team")))
            assert (refusal.status, refusal.code) == (grpc.StatusCode.PERMISSION_DENIED, "permission_denied")
            assert "Health" in refusal.message and "--metrics-key" in refusal.message
            assert not refusal.retryable
        for key in ("admin", "scraper"):
            told = await served.stub.GetLoad(pb.GetLoadRequest(), **bearing(key))
            assert [one.running for one in told.replicas] == [3]
        assert (await served.stub.Health(pb.HealthRequest())).ready


async def test_a_key_for_scraping_calls_nothing_else(model):
    source = saying(model, "fine")
    tenancy = Tenancy(FixedKeys(KeyRing([KeyEntry(hash_key("scraper"), Tenant("prometheus", scrapes=True))])))
    async with serving_grpc(source, model, tenancy) as served:
        stub, key = served.stub, bearing("scraper")
        calls = [
            stub.Generate(ask(), **key),
            stub.Chat(chat("hi"), **key),
            stub.Embed(pb.EmbedRequest(model=MODEL, texts=pb.Texts(texts=["a"])), **key),
            stub.Abort(pb.AbortRequest(request_id="x"), **key),
            stub.GetModelInfo(pb.GetModelInfoRequest(), **key),
            served.channel.unary_unary("/squadron.v1.Inference/Nothing")(b"", **key),
        ]
        for call in calls:
            refusal = await refusal_of(call)
            assert (refusal.status, refusal.code) == (grpc.StatusCode.PERMISSION_DENIED, "permission_denied")
            assert "GetLoad" in refusal.message
    assert not source.requests


async def test_reflection_needs_a_key_as_well(model):
    source = saying(model, "fine")
    async with serving_grpc(source, model, door(team=Quota())) as served:

        def services():
            with grpc.insecure_channel(f"127.0.0.1:{served.server.port}") as channel:
                return ProtoReflectionDescriptorDatabase(channel).get_services()

        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(services)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_what_does_not_exist_is_unimplemented(model):
    async with serving_grpc(saying(model, "a"), model) as served:
        for method in ("/squadron.v1.Inference/Nothing", "/ray.serve.RayServeAPIService/Healthz"):
            refusal = await refusal_of(served.channel.unary_unary(method)(b""))
            assert (refusal.status, refusal.code) == (grpc.StatusCode.UNIMPLEMENTED, "not_found")


async def test_a_quota_that_is_used_up_says_when_to_come_back(model):
    source = saying(model, "fine")
    async with serving_grpc(source, model, door(team=Quota(requests_per_minute=1))) as served:
        await gathered(served.stub.Generate(ask(), **bearing("team")))
        refusal = await refusal_of(served.stub.Generate(ask(), **bearing("team")))
    assert (refusal.status, refusal.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert refusal.retryable
    assert 1 <= refusal.retry_after <= 120


async def test_tenants_share_no_cached_prefix_and_no_account(model):
    source = saying(model, "fine")
    async with serving_grpc(source, model, door(a=Quota(), b=Quota())) as served:
        for key in "ab":
            await gathered(served.stub.Generate(ask(), **bearing(key)))
    assert len({request.cache_salt for request in source.requests}) == 2
    assert [request.tenant for request in source.requests] == ["a", "b"]


async def test_messages_however_long_and_in_whatever_script_fit_into_the_metadata(model):
    async with serving_grpc(saying(model, "a"), model) as served:
        refusal = await refusal_of(served.stub.Generate(pb.GenerateRequest(model="🐟" * 5000, prompt="x")))
    assert (refusal.status, refusal.param) == (MISSING, "model")


@pytest.mark.parametrize("status", sorted({*STATUS_BY_CODE.values(), 400, 408, 499}))
def test_each_status_of_our_errors_has_a_code_of_its_own_meaning(status):
    code = status_code(ApiError("code", "message", status=status))
    assert (code == grpc.StatusCode.INTERNAL) == (status == 500)


async def test_an_address_that_is_taken_is_told_by_the_flags_name():
    service = ForwardingService(Starlette(), lambda: ())
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            GrpcServer(ListenAddress(port=port), service, ForwardingInterceptor(Tenancy(), service), LIMIT)
    assert caught.value.flag == "grpc_port"
    assert str(port) in str(caught.value)
