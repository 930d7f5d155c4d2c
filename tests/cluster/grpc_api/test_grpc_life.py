"""How gRPC calls end: by their client, a deadline, an abort, an error, a stopping server; and what others notice."""

import asyncio

import grpc
import pytest

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.grpc_api.squadron.v1.inference_pb2_grpc import InferenceStub
from cluster.openai.served_model import ServedModel
from cluster.router.models import Models
from cluster.telemetry.metrics import Metrics
from cluster.token_source import NO_CONTEXT, TokenChunk
from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.fake_source import FakeSource
from tests.grpc_client import Refusal, gateway_of, gathered, grpc_services, refusal_of, serving_grpc
from tests.openai_app import MODEL, front_for, saying, served_model

ENDLESS = 10**6
CHUNK = 2048  # tokens, of two bytes each


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=2 * ENDLESS)


def ask(prompt="hi", **sampling):
    given = {"max_tokens": ENDLESS, "ignore_eos": True} | sampling
    return pb.GenerateRequest(model=MODEL, prompt=prompt, sampling=pb.Sampling(**given), output=pb.OUTPUT_TOKENS)


def endless(**changes):
    return FakeSource(lambda *_: range(ENDLESS), **changes)


async def first_token(call):
    """Read to the first token; return the request's id."""
    request_id = ""
    while True:
        response = await call.read()
        request_id = response.request_id or request_id
        if response.deltas:
            return request_id


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_client_that_cancels_ends_its_request(model):
    source = endless(hold=3)
    async with serving_grpc(source, model) as served:
        call = served.stub.Generate(ask())
        request_id = await first_token(call)
        call.cancel()
        await until(lambda: source.closed == [request_id])
        assert 'method="Generate",model_name="demo",status="CANCELLED"} 1.0' in served.metrics.render().decode()


async def test_a_connection_that_breaks_ends_its_requests(model):
    source = endless(hold=3)
    async with serving_grpc(source, model) as served:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}") as channel:
            calls = [channel.unary_stream("/squadron.v1.Inference/Generate")(ask().SerializeToString()) for _ in "ab"]
            for call in calls:
                await call.read()
            await until(lambda: len(source.requests) == 2)
            await channel.close()
        await until(lambda: len(source.closed) == 2)


async def test_a_deadline_ends_the_request_on_both_sides(model):
    source = endless(hold=3)
    async with serving_grpc(source, model) as served:
        call = served.stub.Generate(ask(), timeout=0.3)
        with pytest.raises(grpc.RpcError) as caught:
            await gathered(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(source.closed) == 1)


async def test_a_deadline_holds_while_a_request_waits_for_its_turn(model):
    source = endless(hold=3)
    admission = AdmissionQueue(source, lambda: 1)
    async with serving_grpc(source, model, admission=admission) as served:
        inside = served.stub.Generate(ask())
        await first_token(inside)
        waiting = served.stub.Generate(ask(), timeout=0.3)
        with pytest.raises(grpc.RpcError) as caught:
            await gathered(waiting)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: admission.num_waiting == 0)
        assert len(source.requests) == 1
        inside.cancel()
        await until(lambda: admission.num_inside == 0)


@pytest.mark.parametrize("hold", [3, None], ids=["waiting", "writing"])
async def test_abort_ends_a_stream_from_outside(model, hold):
    source = endless(hold=hold)
    async with serving_grpc(source, model) as served:
        call = served.stub.Generate(ask())
        request_id = await first_token(call)
        await served.stub.Abort(pb.AbortRequest(request_id=request_id))
        refusal = await refusal_of(call)
        assert (refusal.status, refusal.code) == (grpc.StatusCode.CANCELLED, "aborted")
        assert refusal.request_id == request_id
        await until(lambda: source.closed == [request_id])
        again = await refusal_of(served.stub.Abort(pb.AbortRequest(request_id=request_id)))
    assert again.status == grpc.StatusCode.NOT_FOUND


async def test_a_request_that_waits_for_its_turn_can_be_aborted(model):
    source = endless(hold=3)
    admission = AdmissionQueue(source, lambda: 1)
    async with serving_grpc(source, model, admission=admission) as served:
        inside = served.stub.Generate(ask())
        await first_token(inside)
        waiting = served.stub.Generate(ask())
        named = await waiting.read()
        await served.stub.Abort(pb.AbortRequest(request_id=named.request_id))
        assert (await refusal_of(waiting)).code == "aborted"
        assert admission.num_waiting == 0
        inside.cancel()


async def test_nobody_aborts_another_tenants_request(model):
    source = endless(hold=3)
    keys = FixedKeys(KeyRing([KeyEntry(hash_key(name), Tenant(name)) for name in "ab"]))
    async with serving_grpc(source, model, Tenancy(keys)) as served:
        call = served.stub.Generate(ask(), metadata=[("authorization", "Bearer a")])
        request = pb.AbortRequest(request_id=await first_token(call))
        refusal = await refusal_of(served.stub.Abort(request, metadata=[("authorization", "Bearer b")]))
        assert (refusal.status, source.closed) == (grpc.StatusCode.NOT_FOUND, [])
        await served.stub.Abort(request, metadata=[("authorization", "Bearer a")])
        assert (await refusal_of(call)).code == "aborted"


async def test_an_error_in_mid_stream_comes_after_the_tokens_with_its_details(model):
    lost = ApiError("replica_lost", "no replica could go on", status=503)
    async with serving_grpc(endless(hold=3, error=lost), model) as served:
        call, told = served.stub.Generate(ask()), []
        with pytest.raises(grpc.RpcError) as caught:
            async for response in call:
                told += [token for delta in response.deltas for token in delta.token_ids]
    refusal = Refusal.of(caught.value)
    assert told == [0, 1, 2]
    assert (refusal.status, refusal.code) == (grpc.StatusCode.UNAVAILABLE, "replica_lost")
    assert (refusal.retryable, refusal.retry_after) == (True, 1)


async def test_what_breaks_inside_is_told_without_its_words_and_harms_nobody_else(model):
    fine = saying(model, "fine")

    class Broken:
        """Fails for the prompt `x` alone."""

        async def generate(self, request, context=None):
            if len(request.prompt_token_ids) == 1:
                raise ZeroDivisionError("secret")
            async for chunk in fine.generate(request):
                await asyncio.sleep(0)
                yield chunk

        def finish_choice(self, request_id, choice):
            """Nothing to end."""

    async with serving_grpc(Broken(), model) as served:
        text = pb.GenerateRequest(model=MODEL, prompt="hello hello")
        bystanders = [gathered(served.stub.Generate(text)) for _ in range(31)]
        one = pb.GenerateRequest(model=MODEL, prompt_token_ids=pb.TokenIds(ids=[5]))
        refusal, *told = await asyncio.gather(refusal_of(served.stub.Generate(one)), *bystanders)
    assert (refusal.status, refusal.code) == (grpc.StatusCode.INTERNAL, "internal_error")
    assert "secret" not in refusal.message
    assert [one.text for one in told] == ["fine"] * 31


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ("prompt", ("messages", "too deep at json_schema")),
        ("structured", ("tools", "too deep at the parameters of look")),
        ("n", ("n", "too deep at json_schema")),
    ],
)
async def test_what_the_engine_says_of_a_chat_is_told_in_the_clients_words(tmp_path, params, told):
    template = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path, template)))
    model = ServedModel(MODEL, tokenizer, 1024, tokenizer.vocab_size)
    error = ApiError("invalid_value", "too deep at json_schema", param=params)
    asked = pb.ChatRequest(
        model=MODEL,
        messages=[pb.Message(role="user", content="hi")],
        tools=[pb.Tool(name="look", parameters='{"type": "object"}')],
        tool_choice=pb.ToolChoice(function="look"),
    )
    async with serving_grpc(endless(hold=0, error=error), model) as served:
        refusal = await refusal_of(served.stub.Chat(asked))
    assert (refusal.param, refusal.message) == told


async def test_what_the_engine_says_of_a_text_to_embed_names_the_clients_field(model):
    class Refusing:
        async def generate(self, request, context=NO_CONTEXT):
            raise InvalidRequestError("prompt does not fit", "prompt")
            yield

        def finish_choice(self, request_id, choice):
            """Nothing to end."""

    async with serving_grpc(Refusing(), model) as served:
        texts = pb.Texts(texts=["a", "b"])
        refusal = await refusal_of(served.stub.Embed(pb.EmbedRequest(model=MODEL, texts=texts)))
    assert (refusal.status, refusal.param) == (grpc.StatusCode.INVALID_ARGUMENT, "input")


async def test_a_grammar_that_the_engine_refuses_is_told_by_the_clients_field(model):
    error = InvalidRequestError("structured: no such rule", "structured")
    async with serving_grpc(endless(hold=0, error=error), model) as served:
        wanted = pb.StructuredOutputs(grammar="root ::= x")
        refusal = await refusal_of(served.stub.Generate(ask(structured_outputs=wanted, ignore_eos=False)))
    assert (refusal.status, refusal.param) == (grpc.StatusCode.INVALID_ARGUMENT, "structured_outputs")


class Counting:
    """An endless source that counts what was taken of each request."""

    def __init__(self):
        self.taken = {}

    async def generate(self, request, context=None):
        key = request.prompt_token_ids[0]
        for i in range(ENDLESS):
            self.taken[key] = i
            yield TokenChunk(0, tuple(range(200, 200 + CHUNK)))
            await asyncio.sleep(0)

    def finish_choice(self, request_id, choice):
        """Nothing to end."""


async def test_a_reader_that_stops_is_not_buffered_for_and_slows_nobody(model):
    source = Counting()
    async with serving_grpc(source, model) as served:

        def start(token):
            request = pb.GenerateRequest(
                model=MODEL,
                prompt_token_ids=pb.TokenIds(ids=[token]),
                sampling=pb.Sampling(max_tokens=ENDLESS),
                output=pb.OUTPUT_TOKENS,
            )
            return served.stub.Generate(request)

        slow, quick = start(5), start(6)
        await first_token(slow)
        for _ in range(1500):  # the window of HTTP/2 grows to some megabytes where the connection is quick
            await quick.read()
        stopped_at = source.taken[5]
        for _ in range(300):
            await quick.read()
        assert source.taken[5] == stopped_at, "it is produced for though nobody reads"
        slow.cancel()
        quick.cancel()


async def test_a_stopping_server_lets_streams_finish_and_takes_no_more(model):
    source = FakeSource(lambda *_: range(6), hold=3)
    async with serving_grpc(source, model) as served:
        call = served.stub.Generate(ask(max_tokens=6))
        await first_token(call)
        stopping = asyncio.create_task(served.server.stop(10))
        await asyncio.sleep(0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}") as late:
            with pytest.raises(grpc.RpcError) as caught:
                await InferenceStub(late).Health(pb.HealthRequest(), timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        source.go.set()
        told = await gathered(call)
        await stopping
    assert told.usage.completion_tokens == 6


async def test_gateways_of_one_machine_share_a_port_and_one_may_leave(model):
    source = saying(model, "fine")
    async with serving_grpc(source, model) as first:
        metrics = Metrics()
        models = Models([front_for(source, model, metrics, ready=lambda: False)])
        async with gateway_of(grpc_services(models, metrics), first.server.port) as second:
            await second.start()
            await first.server.stop(0)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
                assert not (await InferenceStub(channel).Health(pb.HealthRequest(), timeout=5)).ready
            await second.stop(0)
