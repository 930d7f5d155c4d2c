"""The gRPC service: what is streamed, and that it is what HTTP tells."""

import asyncio

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.router.replica_set import ReplicaView
from cluster.wire.parts import Load
from tests.fake_source import FakeSource
from tests.grpc_client import LIMIT, gathered, serving_grpc
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

TEXT = "hello 🐟 there, world"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def ask(prompt="hi", output=pb.OUTPUT_TEXT, **sampling):
    return pb.GenerateRequest(model=MODEL, prompt=prompt, output=output, sampling=pb.Sampling(**sampling))


async def test_a_stream_names_its_request_then_tells_the_text_and_last_the_usage(model):
    async with serving_grpc(saying(model, TEXT, cached=1), model) as served:
        call = served.stub.Generate(ask(max_tokens=100))
        responses = [response async for response in call]
        trailing = dict(await call.trailing_metadata())
    assert responses[0].request_id.startswith("cmpl-")
    assert not responses[0].deltas
    assert "".join(delta.text for one in responses for delta in one.deltas) == TEXT
    assert [delta.finish_reason for one in responses for delta in one.deltas if delta.finish_reason] == [1]
    assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]
    tokens = len(model.tokenizer.encode(TEXT)) + 1
    assert responses[-1].usage == pb.Usage(
        prompt_tokens=len(model.tokenizer.encode("hi")), completion_tokens=tokens, cached_tokens=1
    )
    assert trailing["x-request-id"] == responses[0].request_id


async def test_hints_without_use_are_named_after_the_answer(model):
    messages = [pb.Message(role="user", content="hi", name="Bob")]
    request = pb.ChatRequest(model=MODEL, messages=messages, sampling=pb.Sampling(stop=[""]))
    async with serving_grpc(saying(model, "ok"), model) as served:
        call = served.stub.Chat(request)
        assert (await gathered(call)).text == "ok"
        told = dict(await call.trailing_metadata())
        plain = served.stub.Generate(ask())
        await gathered(plain)
        assert "x-squadron-ignored" not in dict(await plain.trailing_metadata())
    assert told["x-squadron-ignored"] == "stop, messages[].name"


async def test_tokens_may_be_told_instead_of_text_or_beside_it(model):
    ids = model.tokenizer.encode(TEXT)
    async with serving_grpc(saying(model, TEXT), model) as served:
        tokens = await gathered(served.stub.Generate(ask(output=pb.OUTPUT_TOKENS, max_tokens=100)))
        both = await gathered(served.stub.Generate(ask(output=pb.OUTPUT_TEXT_AND_TOKENS, max_tokens=100)))
        text = await gathered(served.stub.Generate(ask(output=pb.OUTPUT_UNSPECIFIED, max_tokens=100)))
    assert tokens.texts == {0: ""}
    assert tokens.token_ids[0][: len(ids)] == both.token_ids[0][: len(ids)] == ids
    assert both.text == text.text == TEXT
    assert text.token_ids == {0: []}


async def test_a_prompt_of_token_ids_reaches_the_engine_as_it_is(model):
    source = saying(model, "a")
    async with serving_grpc(source, model) as served:
        request = pb.GenerateRequest(model=MODEL, prompt_token_ids=pb.TokenIds(ids=[5, 6, 7]))
        await gathered(served.stub.Generate(request))
    assert source.requests[0].prompt_token_ids == (5, 6, 7)


async def test_every_sampling_field_arrives_as_it_does_over_http(model):
    sampling = {
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": -3,
        "stop": ["x", "yy"],
        "stop_token_ids": [7, 8],
        "logit_bias": {9: 1.5},
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["bad"],
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 3,
    }
    assert set(sampling) == {field.name for field in pb.Sampling.DESCRIPTOR.fields} - {"structured_outputs"}
    source = saying(model, "a b c", "d e f")
    more = {"truncate_prompt_tokens": 1, "priority": -2, "cache_salt": "salt"}
    async with serving_grpc(source, model) as served:
        request = pb.GenerateRequest(model=MODEL, prompt="hi", sampling=pb.Sampling(**sampling), **more)
        await gathered(served.stub.Generate(request))
    json = sampling | {"logit_bias": {"9": 1.5}} | more
    async with client_for(app_for(source, model)) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **json})
    assert answer.status_code == 200, answer.text
    grpc_request, http_request = source.requests
    for name in ("params", "prompt_token_ids", "seed", "priority", "cache_salt"):
        assert getattr(grpc_request, name) == getattr(http_request, name), name


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        (pb.StructuredOutputs(regex="a+"), "regex"),
        (pb.StructuredOutputs(json='{"type": "object"}'), "json_schema"),
        (pb.StructuredOutputs(choice=pb.Choices(choices=["a", "b"])), "choice"),
        (pb.StructuredOutputs(grammar='root ::= "a"'), "grammar"),
        (pb.StructuredOutputs(json_object=True), "json_object"),
    ],
)
async def test_structured_outputs_reach_the_engine(model, wanted, kind):
    source = saying(model, "a")
    async with serving_grpc(source, model) as served:
        await gathered(served.stub.Generate(ask(structured_outputs=wanted, max_tokens=4)))
    assert source.requests[0].params.structured.kind == kind


async def test_choices_are_told_apart_and_each_ends_once(model):
    async with serving_grpc(saying(model, "one", "two two"), model) as served:
        told = await gathered(served.stub.Generate(ask(n=2, max_tokens=50)))
    assert told.texts == {0: "one", 1: "two two"}
    assert told.reasons == {0: pb.FINISH_REASON_STOP, 1: pb.FINISH_REASON_STOP}


async def test_logprobs_name_tokens_by_id_and_bytes(model):
    async with serving_grpc(saying(model, TEXT), model) as served:
        told = await gathered(served.stub.Generate(ask(logprobs=2, max_tokens=100)))
    ids = [one.token_id for one in told.logprobs]
    assert ids[:-1] == model.tokenizer.encode(TEXT)
    assert b"".join(one.token for one in told.logprobs[:-1]).decode() == TEXT
    assert all(one.logprob == -0.5 and len(one.top) == 2 for one in told.logprobs)


async def test_a_stop_string_ends_the_choice_and_the_engines_request(model):
    source = saying(model, "one two three")
    async with serving_grpc(source, model) as served:
        told = await gathered(served.stub.Generate(ask(stop=[" two"], max_tokens=50)))
    assert told.text == "one"
    assert told.reasons == {0: pb.FINISH_REASON_STOP}
    assert source.closed == [told.request_id]


async def test_a_chat_is_the_chat_that_http_runs(model):
    source = saying(model, TEXT)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    request = pb.ChatRequest(
        model=MODEL, messages=[pb.Message(**one) for one in messages], sampling=pb.Sampling(logprobs=1, max_tokens=60)
    )
    async with serving_grpc(source, model) as served:
        told = await gathered(served.stub.Chat(request))
    async with client_for(app_for(source, model)) as client:
        body = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 1, "max_tokens": 60}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert told.text == answer["choices"][0]["message"]["content"] == TEXT
    assert told.request_id.startswith("chatcmpl-")
    assert told.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert source.requests[0].prompt_token_ids == source.requests[1].prompt_token_ids
    content = answer["choices"][0]["logprobs"]["content"]
    assert [list(one.token) for one in told.logprobs] == [one["bytes"] for one in content]


async def test_embeddings_have_length_one_and_keep_their_order(model):
    ids = pb.TokenIdLists(lists=[pb.TokenIds(ids=[3]), pb.TokenIds(ids=[3, 4, 5])])
    source = saying(model, "")
    async with serving_grpc(source, model) as served:
        answer = await served.stub.Embed(pb.EmbedRequest(model=MODEL, token_ids=ids))
        text = await served.stub.Embed(pb.EmbedRequest(model=MODEL, texts=pb.Texts(texts=["hello"])))
    vectors = np.array([one.values for one in answer.embeddings])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1])
    assert vectors[:, 0] == pytest.approx([1 / 2**0.5, 3 / 10**0.5])  # the fake state is [number of tokens, 1]
    assert (answer.usage.prompt_tokens, len(text.embeddings)) == (4, 1)
    assert source.requests[-1].prompt_token_ids == tuple(model.tokenizer.encode("hello", add_special_tokens=True))


async def test_the_clients_label_comes_back_but_names_no_request(model):
    async with serving_grpc(saying(model, "a"), model) as served:
        call = served.stub.Generate(ask(), metadata=[("x-request-id", "mine")])
        told = await gathered(call)
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        labelled = served.stub.Generate(pb.GenerateRequest(model=MODEL, prompt="hi", request_id="other"))
        await gathered(labelled)
        assert dict(await labelled.trailing_metadata())["x-request-id"] == "other"
    assert told.request_id.startswith("cmpl-")


async def test_sixty_four_streams_at_once_each_get_their_own(model):
    source = FakeSource(lambda request, _: [request.prompt_token_ids[0]] * 20)
    async with serving_grpc(source, model) as served:

        async def one(token):
            prompt = pb.TokenIds(ids=[token])
            sampling = pb.Sampling(max_tokens=20, ignore_eos=True)
            request = pb.GenerateRequest(
                model=MODEL, prompt_token_ids=prompt, output=pb.OUTPUT_TOKENS, sampling=sampling
            )
            return await gathered(served.stub.Generate(request))

        told = await asyncio.gather(*[one(token) for token in range(10, 74)])
    assert [one.token_ids[0] for one in told] == [[token] * 20 for token in range(10, 74)]
    assert len({one.request_id for one in told}) == 64


async def test_the_model_its_health_and_load_are_told(model):
    load = Load(3, 1, 40, 100, 60, 10, 0, 0, 0, 0, 0, 0.0)
    view = ReplicaView("r1", 1, False, True, 3, 0.1, load)
    async with serving_grpc(saying(model, "a"), model, replicas=lambda: [view], ready=lambda: False) as served:
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        health = await served.stub.Health(pb.HealthRequest())
        told = await served.stub.GetLoad(pb.GetLoadRequest())
    assert (info.model, info.max_model_len, info.max_message_bytes) == (MODEL, 256, LIMIT)
    assert (info.vocab_size, info.eos_token_id) == (model.vocab_size, model.tokenizer.eos_token_id)
    assert not health.ready
    assert [(one.replica_id, one.running, one.kv_blocks_free) for one in told.replicas] == [("r1", 3, 60)]
    assert (told.waiting, told.inside) == (0, 0)


async def test_answers_are_counted_with_the_other_metrics(model):
    async with serving_grpc(saying(model, "a"), model) as served:
        await gathered(served.stub.Generate(ask()))
        text = served.metrics.render().decode()
    assert f'squadron_grpc_responses_total{{method="Generate",model_name="{MODEL}",status="OK"}} 1.0' in text


async def test_reflection_describes_the_service(model):
    async with serving_grpc(saying(model, "a"), model) as served:

        def described():
            with grpc.insecure_channel(f"127.0.0.1:{served.server.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                names = database.get_services()
                return names, database.FindFileContainingSymbol("squadron.v1.Inference")

        names, file = await asyncio.to_thread(described)
    assert "squadron.v1.Inference" in names
    assert [method.name for method in file.service[0].method] == [
        "Generate",
        "Chat",
        "Embed",
        "Abort",
        "GetModelInfo",
        "Health",
        "GetLoad",
    ]
