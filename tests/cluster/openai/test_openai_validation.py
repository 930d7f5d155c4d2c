"""Bad input: refused before the engine hears of it, with a status and a field that tell the client what to mend."""

import json
import re
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from cluster.errors import ApiError
from cluster.openai import refusals
from cluster.openai import request_fields as schema
from cluster.openai.call import build_requests
from cluster.openai.response_input import parse_response
from cluster.openai.validation import parse_chat, parse_completion
from engine.errors import InvalidRequestError
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

CHAT = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def post(model, path, body, headers=None, **changes):
    """Return the answer to a raw body and assert that the source heard nothing of a refused one."""
    source = saying(model, "ok")
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client_for(app_for(source, model, **changes)) as client:
        sent = {"content-type": "application/json"} if headers is None else headers
        answer = await client.post(f"/v1/{path}", content=content, headers=sent)
    assert (answer.status_code == 200) == bool(source.requests)
    return answer


BAD_FIELDS = [
    ({"model": "gpt-5"}, 404, "model"),
    ({"model": None}, 400, "model"),
    ({"model": 3}, 400, "model"),
    ({"n": 0}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": 10**30}, 400, "n"),
    ({"n": 2.0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "0.5"}, 400, "temperature"),
    ({"temperature": float("nan")}, 400, "temperature"),
    ({"temperature": float("inf")}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"presence_penalty": 2.1}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, 400, "min_tokens"),
    ({"seed": 2**63}, 400, "seed"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": ["x" * 257]}, 400, "stop"),
    ({"stop": [3]}, 400, "stop"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"more": True}}, 400, "stream_options.more"),
    ({"priority": 2**40}, 400, "priority"),
    ({"cache_salt": "x" * 257}, 400, "cache_salt"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"5": float("nan")}}, 400, "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    ({"logit_bias": {"5": True}}, 400, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 4097}, 400, "allowed_token_ids"),
    ({"bad_words": ["x"] * 129}, 400, "bad_words"),
    ({"bad_words": [""]}, 400, "bad_words"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**30}, 400, "truncate_prompt_tokens"),
    ({"request_id": "a b"}, 400, "request_id"),
    ({"request_id": "a" * 129}, 400, "request_id"),
    ({"user": "u" * 1025}, 400, "user"),
    ({"guided_json": {}}, 400, "guided_json"),
    ({"structured_outputs": {}}, 400, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, 400, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": ""}}, 400, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, 400, "structured_outputs.regex"),
    ({"structured_outputs": {"json": 5}}, 400, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, 400, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json_object": True}, "min_tokens": 3}, 400, "min_tokens"),
    ({"structured_outputs": {"json_object": True}, "ignore_eos": True}, 400, "ignore_eos"),
    ({"top_kk": 3}, 400, "top_kk"),
    ({"x" * 5000: 3}, 400, "x" * 100),
]  # fmt: skip
BAD_COMPLETIONS = [
    *BAD_FIELDS,
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", ""]}, 400, "prompt"),
    ({"prompt": ["a", 3]}, 400, "prompt"),
    ({"prompt": [1, True]}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [1, -1]}, 400, "prompt"),
    ({"prompt": [10**6]}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": "x " * 400}, 400, "prompt"),
    ({"prompt": "x", "max_tokens": 256}, 400, "prompt"),
    ({"prompt": "x", "min_tokens": 256, "max_tokens": 256}, 400, "prompt"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"echo": 1}, 400, "echo"),
    ({"best_of": 2}, 400, "best_of"),
    ({"suffix": "end"}, 400, "suffix"),
]
BAD_CHATS = [
    *BAD_FIELDS,
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "messages[0].role"),
    ({"messages": [*CHAT, {"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, 400, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, 400, "messages[0].reasoning"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, 400, "messages[0].name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "detail": "high"}]}]},
        400,
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, 400, "messages"),
    ({"logprobs": 3}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        400,
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, 400, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, 400, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tool_choice": "any"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        400,
        "tool_choice",
    ),
    ({"functions": [{"name": "f"}]}, 400, "functions"),
    ({"function_call": {"name": "f"}}, 400, "function_call"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}},
        400,
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n m", "schema": {}}}},
        400,
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        400,
        "structured_outputs",
    ),
    ({"reasoning_effort": "lots"}, 400, "reasoning_effort"),
    ({"store": True}, 400, "store"),
    ({"service_tier": 1}, 400, "service_tier"),
    ({"verbosity": "loud"}, 400, "verbosity"),
    ({"modalities": ["text", "audio"]}, 400, "modalities"),
    ({"prediction": "x"}, 400, "prediction"),
    ({"web_search_options": {}}, 400, "web_search_options"),
    ({"audio": {}}, 400, "audio"),
    ({"moderation": {}}, 400, "moderation"),
    ({"prompt_cache_retention": 24}, 400, "prompt_cache_retention"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
    ({"echo": True}, 400, "echo"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ({"chat_template_kwargs": {"thinking": "much"}}, 400, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "add_generation_prompt"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
async def test_a_bad_completion_is_refused_by_name(model, change, status, param):
    await refused(model, "completions", {"model": MODEL, "prompt": "hello", "max_tokens": 4} | change, status, param)


@pytest.mark.parametrize(("change", "status", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_a_bad_chat_is_refused_by_name(model, change, status, param):
    await refused(model, "chat/completions", {"model": MODEL, "messages": CHAT} | change, status, param)


async def refused(model, path, body, status, param):
    answer = await post(model, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert param[:50].split(".")[0].split("[")[0] in error["message"]
    assert len(error["message"]) <= 1000
    assert error["code"]
    assert "{{" not in error["message"]
    assert error["retryable"] is False
    assert answer.headers["x-request-id"] == error["request_id"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b'{"model": "demo", "prompt": "\\ud800"}', b"[" * 5000, b"9" * 10_000,
     b'{"n": ' + b"9" * 5000 + b"}", b"\x00" * 100],
)  # fmt: skip
async def test_what_is_no_json_object_is_a_400(model, body):
    answer = await post(model, "completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def test_values_that_ask_for_nothing_are_let_through(model):
    neutral = {
        "best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "stop": None, "temperature": None,
        "stream": False, "user": "me", "stream_options": None,
    }  # fmt: skip
    assert (await post(model, "completions", {"model": MODEL, "prompt": "a", **neutral})).status_code == 200
    neutral = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "store": False, "service_tier": "auto", "metadata": {}, "top_logprobs": None, "n": None,
        "modalities": ["text"],
    }  # fmt: skip
    assert (await post(model, "chat/completions", {"model": MODEL, "messages": CHAT, **neutral})).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt must hold 1 to 128 prompts, not 0"), (5, "prompt must be a string, a list of strings, a list of")],
)
async def test_a_wrong_prompt_is_told_so_in_a_sentence(model, prompt, message):
    answer = await post(model, "completions", {"model": MODEL, "prompt": prompt})
    assert answer.json()["error"]["message"].startswith(message)


async def test_a_misspelled_field_is_told_its_name(model):
    answer = await post(model, "completions", {"model": MODEL, "prompt": "a", "max_token": 3})
    assert answer.json()["error"]["message"] == "unknown field max_token; did you mean max_tokens?"


def test_every_field_of_openais_api_is_honoured_or_refused():
    chat = chat_create_params.CompletionCreateParamsStreaming.__annotations__
    chat = {**chat_create_params.CompletionCreateParamsBase.__annotations__, **chat}
    assert set(chat) <= {*schema.ChatFields.model_fields, *refusals.REFUSED_CHAT}
    plain = completion_create_params.CompletionCreateParamsStreaming.__annotations__
    plain = {**completion_create_params.CompletionCreateParamsBase.__annotations__, **plain}
    assert set(plain) <= {*schema.CompletionFields.model_fields, *refusals.REFUSED_COMPLETION}
    assert not set(schema.ChatFields.model_fields) & set(refusals.REFUSED_CHAT)
    assert not set(schema.CompletionFields.model_fields) & set(refusals.REFUSED_COMPLETION)


async def test_fields_of_old_servers_are_told_their_replacement(model):
    for name, new in (("guided_json", "json"), ("guided_regex", "regex"), ("guided_grammar", "grammar")):
        answer = await post(model, "completions", {"model": MODEL, "prompt": "a", name: "x"})
        assert f"structured_outputs={{'{new}': ...}}" in answer.json()["error"]["message"]


async def test_a_prompt_that_is_too_long_says_what_fits(model):
    answer = await post(model, "completions", {"model": MODEL, "prompt": [5] * 300, "max_tokens": 1})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "This model's maximum context length is 256 tokens. However, you requested 301 tokens "
        "(300 in the prompt, 1 in the completion). Please reduce the length of the prompt."
    )
    chat = await post(model, "chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 255})
    assert re.fullmatch(
        r"This model's maximum context length is 256 tokens\. However, you requested \d+ tokens "
        r"\(\d+ in the messages, 255 in the completion\)\. "
        r"Please reduce the length of the messages or of the completion\.",
        chat.json()["error"]["message"],
    )
    just_fits = await post(model, "completions", {"model": MODEL, "prompt": [5] * 255, "max_tokens": 1})
    assert just_fits.status_code == 200


async def test_a_prompt_that_exceeds_the_whole_cache_says_so(tmp_path):
    small = served_model(tmp_path, kv_capacity=64)
    answer = await post(small, "completions", {"model": MODEL, "prompt": [5] * 64, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    words = "This model's maximum context length is 64 tokens here, for the KV cache holds no more. However, "
    assert answer.json()["error"]["message"].startswith(words)


LONG = "x " * 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("responses", {"input": LONG}, "input"),
        ("responses", {"input": "hi", "max_output_tokens": 255}, "input"),
        ("embeddings", {"input": LONG}, "input"),
        ("embeddings", {"input": ["a", LONG]}, "input[1]"),
        ("completions", {"prompt": ["a", LONG]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
async def test_every_route_tells_of_a_context_that_is_too_short_in_openais_words(model, path, fields, param):
    error = (await post(model, path, {"model": MODEL, **fields})).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert param in error["message"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read(model):
    app = app_for(saying(model, "ok"), model, max_body_bytes=1000)
    body = json.dumps({"model": MODEL, "prompt": "x" * 2000}).encode()
    reads = 0

    async def endless():
        nonlocal reads
        while True:
            reads += 1
            yield b"x" * 400

    headers = {"content-type": "application/json"}
    async with client_for(app) as client:
        declared = await client.post("/v1/completions", content=body, headers=headers)
        chunked = await client.post("/v1/completions", content=endless(), headers=headers)
        at_limit = json.dumps({"model": MODEL, "prompt": [5], "user": ""}).encode()
        at_limit = at_limit.replace(b'"user": ""', b'"user": "' + b"u" * (1000 - len(at_limit)) + b'"')
        fits = await client.post("/v1/completions", content=at_limit, headers=headers)
    assert (declared.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)
    assert reads <= 4
    assert "1000 bytes" in declared.json()["error"]["message"]


async def test_other_content_types_and_compressed_bodies_are_refused(model):
    body = {"model": MODEL, "prompt": "a"}
    form = await post(model, "completions", body, {"content-type": "application/x-www-form-urlencoded"})
    zipped = await post(model, "completions", body, {"content-type": "application/json", "content-encoding": "gzip"})
    assert (form.status_code, zipped.status_code) == (415, 415)
    assert "application/json" in form.json()["error"]["message"]
    assert (await post(model, "completions", body, {"content-type": "application/json; charset=utf-8"})).is_success
    untyped = await post(model, "completions", body, {})
    assert untyped.status_code == 415
    assert "Content-Type" in untyped.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"model": MODEL, "prompt": "a", "n": 10**9},
        {"model": MODEL, "prompt": "a", "stop": ["x" * 256] * 10_000},
        {"model": MODEL, "prompt": "a", "stop_token_ids": [1] * 100_000},
        {"model": MODEL, "prompt": [["x"]] * 100_000},
        {"model": MODEL, "prompt": "a", "x" * 1_000_000: 1},
        {"model": "m" * 3_000_000, "prompt": "a"},
        {"model": MODEL, "prompt": [1] * 1_000_000},
        {"model": MODEL, "messages": [1] * 1_000_000},
        {"model": MODEL, "messages": [{"role": "user", "content": [1] * 1_000_000}]},
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 100_000},
    ],
    ids=["n", "stop", "stop_token_ids", "prompts", "field", "model", "ids", "messages", "parts", "conversation"],
)
@pytest.mark.timeout(20)  # some 0.1 s each; what grows by the square would take minutes
async def test_hostile_sizes_are_refused_soon(model, body):
    content = json.dumps(body).encode()
    answer = await post(model, "chat/completions" if "messages" in body else "completions", content)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000


NUMBERS = st.integers() | st.integers(-3, 30) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["user", "text", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
FIELDS = sorted({*schema.CompletionFields.model_fields, *schema.ChatFields.model_fields, "tools", "echo", "zz"})


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
@pytest.mark.parametrize("chat", [True, False])
def test_no_json_object_does_anything_but_run_or_be_refused_by_name(model, chat, fields):
    base = {"model": MODEL, "messages": CHAT} if chat else {"model": MODEL, "prompt": "a"}
    parse = parse_chat if chat else parse_completion
    try:
        requests = build_requests(parse({**base, **fields}, model), model)
    except (ApiError, InvalidRequestError) as error:
        assert error.param
        assert error.param.split(".")[0].split("[")[0] in {*base, *fields}
    else:
        assert all(request.prompt_token_ids for request in requests)


MANY = {f"k{i}": i for i in range(20_000)}
TURN = {"role": "user", "content": "x"}
FULL = [
    (parse_chat, {"messages": [TURN | MANY]}, "messages[0].k0"),
    (parse_chat, {"messages": [{"role": "assistant", "tool_calls": [CALL | MANY]}]},
     "messages[0].tool_calls[0].k0"),
    (parse_chat, {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"} | MANY}]},
     "tools[0].function.k0"),
    (parse_chat, {"messages": CHAT, "response_format": {"type": "text"} | MANY}, "response_format.k0"),
    (parse_chat, {"messages": CHAT, "stream": True, "stream_options": MANY}, "stream_options.k0"),
    (parse_completion, {"prompt": "x", "structured_outputs": MANY}, "structured_outputs.k0"),
    (parse_response, {"input": [TURN | MANY]}, "input[0].k0"),
    (parse_response, {"input": "x", "reasoning": MANY}, "reasoning.k0"),
    (parse_response, {"input": "x", "include": ["a"] * 20_000}, "include[0]"),
    (parse_response, {"input": "x", "tools": [{}] * 20_000}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "body", "param"), FULL, ids=[param for _, _, param in FULL])
def test_what_is_wrong_20_000_times_takes_the_memory_of_one_error(model, parse, body, param):
    tracemalloc.start()
    with pytest.raises(InvalidRequestError) as caught:
        parse({"model": MODEL, **body}, model)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.param == param
    assert peak < 2**20, "some 12 MiB where an error is made for each"


async def test_errors_echo_no_more_than_a_little_of_what_was_sent(model):
    answer = await post(model, "completions", {"model": MODEL, "prompt": "a", "temperature": "s" * 100_000})
    assert len(answer.content) < 1000
