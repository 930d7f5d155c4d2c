"""Fields of vLLM's and SGLang's servers: how thoughts and log-probabilities are told, formats at the top."""

from dataclasses import replace

import pytest

from cluster.openai.parsers.reasoning import Qwen3Parser
from engine.sampling_params import StructuredOutput
from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model

CHAT = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nhm\n</think>\n\nYes"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def thinker(model):
    return replace(model, reasoning_parser=Qwen3Parser)


async def post(source, model, **fields):
    route = "completions" if "prompt" in fields else "chat/completions"
    async with client_for(app_for(source, model)) as client:
        return await client.post(f"/v1/{route}", json={"model": MODEL} | fields)


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({}, "Yes", "hm"),
        ({"include_reasoning": True, "separate_reasoning": True}, "Yes", "hm"),
        ({"include_reasoning": False}, "Yes", None),
        ({"separate_reasoning": False}, THOUGHT, None),
    ],
)
async def test_thoughts_are_told_apart_left_out_or_left_in(thinker, fields, content, reasoning):
    answer = (await post(saying(thinker, THOUGHT), thinker, messages=CHAT, **fields)).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    if "separate_reasoning" not in fields or fields["separate_reasoning"]:
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
    streamed = events((await post(saying(thinker, THOUGHT), thinker, messages=CHAT, stream=True, **fields)).text)
    deltas = [one["choices"][0]["delta"] for one in streamed[:-1]]
    assert "".join(one.get("content") or "" for one in deltas) == content
    assert ("".join(one.get("reasoning_content") or "" for one in deltas) or None) == reasoning


async def test_tokens_are_named_by_their_ids(model):
    ids = model.tokenizer.encode("ok")
    fields = {"return_tokens_as_token_ids": True, "logprobs": 1}
    answer = (await post(saying(model, "ok"), model, prompt="a", **fields)).json()
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"][: len(ids)] == [f"token_id:{one}" for one in ids]
    assert all(name.startswith("token_id:") for one in told["top_logprobs"] for name in one)
    fields |= {"logprobs": True, "top_logprobs": 1}
    answer = (await post(saying(model, "ok"), model, messages=CHAT, **fields)).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in entries[: len(ids)]] == [f"token_id:{one}" for one in ids]
    assert all(best["token"].startswith("token_id:") for one in entries for best in one["top_logprobs"])
    assert bytes(entries[0]["bytes"]) == model.tokenizer.token_bytes(ids[0])


@pytest.mark.parametrize("where", [{"prompt": "a"}, {"messages": CHAT}], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"regex": "[ab]+"}, StructuredOutput("regex", "[ab]+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutput("grammar", 'root ::= "a"')),
    ],
)
async def test_formats_of_sglang_reach_the_engine(model, where, fields, wanted):
    source = saying(model, "ok")
    assert (await post(source, model, **where, **fields)).status_code == 200
    assert source.requests[0].params.structured == wanted


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "ebnf and regex say the same thing"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "regex", "regex and structured_outputs"),
        ({"regex": ""}, "regex", "must not be empty"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "the best 20 at most"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "the best 20 of each token"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "only with logprobs=true"),
        ({"thinking_token_budget": 10}, "thinking_token_budget", "needs a server with --reasoning-parser"),
    ],
)
async def test_what_cannot_be_is_refused_with_what_can(model, fields, param, words):
    error = (await post(saying(model, "x"), model, messages=CHAT, **fields)).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_all_logprobs_of_a_completion_are_refused_too(model):
    error = (await post(saying(model, "x"), model, prompt="a", logprobs=-1)).json()["error"]
    assert (error["param"], error["code"]) == ("logprobs", "unsupported_value")


async def test_a_model_that_is_not_there_is_told_in_vllms_words(model):
    async with client_for(app_for(saying(model, "x"), model)) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "other", "messages": CHAT})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "model_not_found")
    assert error["message"] == "The model `other` does not exist. This server has `demo`."


async def test_tools_that_the_server_would_run_are_refused_with_what_there_is(model):
    async with client_for(app_for(saying(model, "x"), model)) as client:
        body = {"model": MODEL, "input": "hi", "tools": [{"type": "web_search"}]}
        error = (await client.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "tools[0].type"
    assert error["message"].startswith(
        "tools[0].type must be 'function', the one kind that there is, not 'web_search'"
    )
