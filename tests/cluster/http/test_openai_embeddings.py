"""Embeddings: pooled, normalised, in both encodings, for many inputs at once, and what is refused."""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import get_args

import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from cluster.config import parse_config
from cluster.config_values import POOLINGS
from cluster.errors import ApiError
from cluster.openai import embeddings
from cluster.openai.embeddings import MAX_AT_ONCE, answer_body
from cluster.openai.served_model import matryoshka_of
from cluster.telemetry.metrics import Metrics
from cluster.token_source import TokenChunk
from engine.errors import ConfigError, PromptTooLongError
from engine.request import Pooling
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, served_model, serving


class Pools:
    """A source that embeds: the state of a prompt is its length, its first id, its last id and 1."""

    def __init__(self, error=None, fail_at=-1):
        self.requests, self.error, self.fail_at = [], error, fail_at
        self.running, self.most, self.closed = 0, 0, 0

    def state(self, ids):
        return (float(len(ids)), ids[0], ids[-1], 1.0)

    async def generate(self, request, context=None) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if len(self.requests) - 1 == self.fail_at:
                raise self.error
            await asyncio.sleep(0)
            ids = request.prompt_token_ids
            yield TokenChunk(0, (), finish_reason="stop", embedding=self.state(ids))
        finally:
            self.running -= 1
            self.closed += 1

    def finish_choice(self, request_id, choice):
        raise AssertionError("an embedding has no choice to end")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def post(source, model, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post("/v1/embeddings", json={"model": MODEL, **fields})


def unit(ids):
    vector = np.array([len(ids), ids[0], ids[-1], 1.0])
    return vector / np.linalg.norm(vector)


async def test_an_embedding_is_what_the_openai_types_expect(model):
    source = Pools()
    answer = await post(source, model, input="hello world")
    body = CreateEmbeddingResponse.model_validate(answer.json(), strict=True)
    ids = model.tokenizer.encode("hello world")
    assert source.requests[0].prompt_token_ids == tuple(ids)
    assert (body.object, body.model, body.data[0].index, body.data[0].object) == ("list", MODEL, 0, "embedding")
    np.testing.assert_allclose(body.data[0].embedding, unit(ids), atol=1e-6)
    assert (body.usage.prompt_tokens, body.usage.total_tokens) == (len(ids), len(ids))
    assert answer.headers["x-request-id"].startswith("embd-")


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd ef"], ["ab", "cd ef"]),
        ([65, 66], [[65, 66]]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ],
)
async def test_inputs_are_texts_or_token_ids_and_keep_their_order(model, given, prompts):
    source = Pools()
    answer = (await post(source, model, input=given)).json()
    ids = [model.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
    for one, expected in zip(answer["data"], ids, strict=True):
        np.testing.assert_allclose(one["embedding"], unit(expected), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_base64_holds_the_same_numbers_as_float32(model):
    plain = (await post(Pools(), model, input="hello")).json()["data"][0]["embedding"]
    coded = (await post(Pools(), model, input="hello", encoding_format="base64")).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(plain, np.float32))


async def test_pooling_is_the_servers_unless_the_client_says(model):
    for server, asked, used in (("last", None, "last"), ("mean", None, "mean"), ("mean", "last", "last")):
        source = Pools()
        await post(source, replace(model, pooling=server), input="a", **({"pooling": asked} if asked else {}))
        assert source.requests[0].pooling == used
        assert source.requests[0].params.max_tokens == 1


async def test_many_inputs_run_at_once_but_not_all(model):
    source = Pools()
    answer = await post(source, model, input=["a", "b"] * 200)
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == source.closed == 400
    assert 1 < source.most <= MAX_AT_ONCE
    assert len({request.request_id for request in source.requests}) == 400


async def test_vectors_are_cut_only_for_models_that_were_trained_for_it(model):
    cut = replace(model, matryoshka=())
    answer = (await post(Pools(), cut, input=[65, 66], dimensions=2)).json()
    expected = np.array([2.0, 65.0])
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected / np.linalg.norm(expected), atol=1e-6)


BAD = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", [1]]}, "input"),
    ({"input": [[1], []]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [True]}, "input"),
    ({"input": [[65], [10**6]]}, "input[1]"),
    ({"input": [-1]}, "input"),
    ({"input": 5}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ["a", "word " * 400]}, "input[1]"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 2}, "dimensions"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "normalize": False}, "normalize"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
    ({"input": "a", "messages": []}, "messages"),
    ({"input": "a", "cache_salt": "x" * 300}, "cache_salt"),
    ({"input": "a", "priority": 2**40}, "priority"),
    ({"input": "a", "user": 5}, "user"),
    ({"input": "a", "inputs": "a"}, "inputs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_what_is_wrong_is_refused_by_the_fields_name(model, fields, param):
    source = Pools()
    async with client_for(app_for(source, model)) as client:
        body = json.dumps({"model": MODEL, **fields})
        answer = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not source.requests


@pytest.mark.parametrize(("sizes", "dimensions"), [((), 0), ((), 5), ((2, 4), 3)])
async def test_lengths_that_the_model_does_not_have_are_refused(model, sizes, dimensions):
    answer = await post(Pools(), replace(model, matryoshka=sizes), input="a", dimensions=dimensions)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")


async def test_another_model_is_not_found(model):
    async with client_for(app_for(Pools(), model)) as client:
        answer = await client.post("/v1/embeddings", json={"model": "other", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


class Wide(Pools):
    """States of many numbers."""

    def state(self, ids):
        return tuple(float(i % 7) for i in range(4096))


@pytest.mark.parametrize(("inputs", "beside"), [(1, False), (9, True)])
@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_answers_of_many_numbers_are_written_beside_the_event_loop(
    model, monkeypatch, encoding, inputs, beside
):
    threads = []

    def watched(*args):
        threads.append(threading.current_thread())
        return answer_body(*args)

    monkeypatch.setattr(embeddings, "answer_body", watched)
    answer = await post(Wide(), model, input=["a"] * inputs, encoding_format=encoding)
    assert [one["index"] for one in answer.json()["data"]] == list(range(inputs))
    assert [thread is not threading.main_thread() for thread in threads] == [beside]


async def test_one_failing_input_ends_the_whole_call(model):
    metrics = Metrics()
    source = Pools(ApiError("replica_lost", "no replica is left"), fail_at=3)
    async with client_for(app_for(source, model, metrics=metrics)) as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": ["a"] * 10})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"] == "1"
    assert source.running == 0
    assert 'finished_reason="error"' in metrics.render().decode()


async def test_an_input_that_the_engine_refuses_is_told_by_the_clients_name(model):
    source = Pools(PromptTooLongError("prompt does not fit the cache"), fail_at=0)
    answer = await post(source, model, input="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


async def test_the_real_openai_client_gets_its_vectors(model):
    async with (
        serving(app_for(Pools(), model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        found = await client.embeddings.create(model=MODEL, input=["hello", "world"])
        assert [one.index for one in found.data] == [0, 1]
        np.testing.assert_allclose(found.data[0].embedding, unit(model.tokenizer.encode("hello")), atol=1e-6)
        plain = await client.embeddings.create(model=MODEL, input="hello", encoding_format="float")
        np.testing.assert_allclose(plain.data[0].embedding, found.data[0].embedding, atol=1e-7)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="")
        assert caught.value.body["param"] == "input"


def test_the_settings_poolings_are_the_engines():
    assert get_args(Pooling) == POOLINGS
    with pytest.raises(ConfigError, match="last, mean") as caught:
        parse_config({"model": "demo", "embedding_pooling": "cls"})
    assert caught.value.flag == "embedding_pooling"


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, None),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"matryoshka_dimensions": [256, 64]}, (64, 256)),
        ({"matryoshka_dimensions": "all"}, None),
    ],
)
def test_a_checkpoint_says_to_what_its_vectors_may_be_cut(config, sizes):
    assert matryoshka_of(config) == sizes


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(0, 4)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(0, 4)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": 200}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
    ],
)
async def test_inputs_are_cut_where_that_is_asked_for(model, asked, kept):
    ids = list(range(5, 25))
    source = Pools()
    answer = await post(source, model, input=ids, **asked)
    assert answer.status_code == 200, answer.text
    assert list(source.requests[0].prompt_token_ids) == ids[kept]
    assert answer.json()["usage"]["prompt_tokens"] == len(ids[kept])


async def test_minus_one_keeps_as_many_as_can_be_embedded(model):
    source, ids = Pools(), [5] * (2 * model.max_model_len)
    assert (await post(source, model, input=ids)).status_code == 400
    assert (await post(source, model, input=ids, truncate_prompt_tokens=-1)).status_code == 200
    assert len(source.requests[0].prompt_token_ids) == model.max_model_len - 1


async def test_what_the_tokenizer_adds_stays_where_a_text_is_cut(tmp_path):
    """The state of the last token is what is pooled: of models that end each text with one of their own, that one."""
    folder = tiny_tokenizer.save(tiny_tokenizer.with_ends(tiny_tokenizer.byte_level()), tmp_path)
    tokenizer = Tokenizer(str(folder))
    model = replace(served_model(tmp_path), tokenizer=tokenizer)
    whole, own = tokenizer.encode("hello world"), tokenizer.encode("hello world", add_special_tokens=False)
    assert whole[1:-1] == own, "the tokenizer adds something at both ends"
    for side, text in (("right", own[:3]), ("left", own[-3:])):
        source = Pools()
        await post(source, model, input="hello world", truncate_prompt_tokens=5, truncation_side=side)
        assert list(source.requests[0].prompt_token_ids) == [whole[0], *text, whole[-1]]
