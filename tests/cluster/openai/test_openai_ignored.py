"""Fields that clients send as hints: taken, named in `x-squadron-ignored`, and refused with `--strict-fields`."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cluster.batch.row_requests import Preparer
from cluster.batch.rows import CHAT, COMPLETIONS, EMBEDDINGS, Task
from cluster.openai.parsers.tool_formats import HermesParser
from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model

HEADER = "x-squadron-ignored"
HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Reads all that one can: what is a hint to another template is a part of this one's prompt.
READS_ALL = (
    "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}{{- reasoning_effort or '' -}}{{- enable_thinking or '' -}}"
    "{%- for message in messages -%}{{- '<|' + message.role + '|>' + (message.name or '') + message.content -}}"
    "{{- message.reasoning_content or '' -}}{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}"
    "{%- endif -%}{%- if message.tool_call_id -%}{{- '@' + message.tool_call_id -}}{%- endif -%}{%- endfor -%}"
)
READS_CALLS = READS_ALL.replace("(message.name or '')", "''").replace("message.reasoning_content or ", "")


def saying_first(**fields):
    return [{"role": "assistant", "content": "hello", **fields}, HI]


ANYWHERE = [
    ({"store": False}, "store"),
    ({"service_tier": "auto"}, "service_tier"),
    ({"verbosity": "high"}, "verbosity"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"safety_identifier": "me"}, "safety_identifier"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key"),
]
GENERATION = [
    ({"stop": ""}, "stop"),
    ({"stop": ["", "x"]}, "stop"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"length_penalty": 1.5}, "length_penalty"),
]
CHATS = [
    *GENERATION,
    ({"messages": [{**HI, "name": "Bob"}]}, "messages[].name"),
    ({"messages": saying_first(reasoning_content="hm")}, "messages[].reasoning_content"),
    ({"messages": saying_first(reasoning="hm")}, "messages[].reasoning"),
    ({"messages": saying_first(reasoning_details=[{"type": "x"}])}, "messages[].reasoning_details"),
    ({"messages": saying_first(parsed={"a": 1})}, "messages[].parsed"),
    (
        {"messages": [{**HI, "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
        "messages[].content[].cache_control",
    ),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking"),
    ({"verbosity": "low"}, "verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
]
RESPONSES = [
    *[({name: value}, shown) for fields, shown in GENERATION[:2] for name, value in fields.items()],
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"include": ["reasoning.encrypted_content"]}, "include[reasoning.encrypted_content]"),
    ({"include": ["file_search_call.results"]}, "include[file_search_call.results]"),
    ({"input": [{**HI, "name": "Bob"}]}, "input[].name"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    (
        {"input": [{**HI, "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]}]},
        "input[].content[].prompt_cache_breakpoint",
    ),
]
CASES = [
    *[("/v1/chat/completions", {"messages": [HI]}, *case) for case in CHATS],
    *[("/v1/completions", {"prompt": "hi"}, *case) for case in [*ANYWHERE, *GENERATION]],
    *[("/v1/responses", {"input": "hi"}, *case) for case in RESPONSES],
    *[("/v1/embeddings", {"input": "hi"}, *case) for case in ANYWHERE],
    ("/tokenize", {}, {"messages": [{**HI, "name": "Bob"}]}, "messages[].name"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def strict(model):
    return replace(model, strict_fields=True)


def reading(model, template, folder):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder, template)
    return replace(model, tokenizer=Tokenizer(str(folder)), tool_parser=HermesParser)


@pytest.fixture(scope="module")
def reads_all(model, tmp_path_factory):
    return reading(model, READS_ALL, tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="module")
def reads_calls(model, tmp_path_factory):
    return reading(model, READS_CALLS, tmp_path_factory.mktemp("calls"))


async def post(model, path, source=None, **fields):
    async with client_for(app_for(source or saying(model, "ok"), model)) as client:
        return await client.post(path, json={"model": MODEL, **fields})


async def prompt_of(model, path, **fields):
    source = saying(model, "ok")
    answer = await post(model, path, source, **fields)
    assert answer.status_code == 200, answer.text
    ids = source.requests[0].prompt_token_ids
    return model.tokenizer.decode(ids, skip_special_tokens=False), answer.headers.get(HEADER)


@pytest.mark.parametrize(("path", "body", "fields", "shown"), CASES, ids=lambda value: str(value)[-50:])
async def test_a_hint_without_use_is_taken_and_named(model, path, body, fields, shown):
    answer = await post(model, path, **body | fields)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, shown), answer.text


@pytest.mark.parametrize(("path", "body", "fields", "shown"), CASES, ids=lambda value: str(value)[-50:])
async def test_a_strict_server_refuses_it(strict, path, body, fields, shown):
    source = saying(strict, "ok")
    answer = await post(strict, path, source, **body | fields)
    assert answer.status_code == 400
    assert not source.requests
    param = answer.json()["error"]["param"]
    assert param
    field = shown.split("[")[0].split(".")[0]
    assert param.startswith(field), param


async def test_a_request_without_hints_has_no_such_header(model):
    neutral = {"store": False, "service_tier": "auto", "verbosity": "medium", "user": "me"}
    answer = await post(model, "/v1/chat/completions", messages=[HI], **neutral)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None)


async def test_all_hints_of_a_request_are_named_once(model):
    messages = [{**HI, "name": f"user-{i}"} for i in range(50)]
    answer = await post(model, "/v1/chat/completions", messages=messages, verbosity="low", stop=["", ""])
    assert answer.headers[HEADER] == "verbosity, stop, messages[].name"


async def test_hints_change_no_token_and_no_prompt(model):
    source = saying(model, "ok")
    plain = await post(model, "/v1/chat/completions", source, messages=[HI], seed=1)
    hinted = await post(
        model,
        "/v1/chat/completions",
        source,
        messages=[{**HI, "name": "Bob"}],
        seed=1,
        reasoning_effort="high",
        prediction={"type": "content", "content": "x"},
        stop="",
    )
    assert plain.json()["choices"] == hinted.json()["choices"]
    first, second = source.requests
    assert (first.prompt_token_ids, first.params) == (second.prompt_token_ids, second.params)


async def test_what_the_template_reads_is_no_hint(reads_all):
    messages = [{**HI, "name": "Bob"}, *saying_first(reasoning="well")]
    text, ignored = await prompt_of(
        reads_all,
        "/v1/chat/completions",
        messages=messages,
        reasoning_effort="high",
        chat_template_kwargs={"enable_thinking": True},
    )
    assert ignored is None
    assert text.startswith("highTrue<|user|>Bobhi<|assistant|>hellowell")
    text, ignored = await prompt_of(
        reads_all, "/v1/responses", input=[{**HI, "name": "Bob"}], reasoning={"effort": "low"}
    )
    assert (text, ignored) == ("low<|user|>Bobhi", None)


async def test_thoughts_by_both_names_are_told_once(reads_all):
    same = saying_first(reasoning="well", reasoning_content="well")
    text, ignored = await prompt_of(reads_all, "/v1/chat/completions", messages=same)
    assert (text.count("well"), ignored) == (1, None)
    other = saying_first(reasoning="other", reasoning_content="well")
    text, ignored = await prompt_of(reads_all, "/v1/chat/completions", messages=other)
    assert ("well" in text, "other" in text, ignored) == (True, False, "messages[].reasoning")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_of_others_are_refused_by_the_name_that_was_sent(model, name):
    answer = await post(model, "/v1/chat/completions", messages=[{**HI, name: "hm"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages[0].{name}")


async def test_pieces_of_streamed_calls_can_be_sent_back(reads_calls):
    function = {**CALL["function"], "parsed_arguments": {"a": 1}}
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0, "function": function}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "f"},
    ]
    text, ignored = await prompt_of(reads_calls, "/v1/chat/completions", messages=messages)
    assert "index" not in text
    assert "parsed" not in text
    named = ["messages[].tool_calls[].index", "messages[].tool_calls[].function.parsed_arguments", "messages[].name"]
    assert ignored == ", ".join(named)
    strict = replace(reads_calls, strict_fields=True)
    answer = await post(strict, "/v1/chat/completions", messages=messages)
    assert answer.json()["error"]["param"] in (
        "messages[1].tool_calls[0].index",
        "messages[1].tool_calls[0].function.parsed_arguments",
    )


async def test_parsed_outputs_of_a_response_can_be_sent_back(reads_calls):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "parsed_arguments": {}}
    said = {"type": "output_text", "text": "well", "annotations": [], "parsed": {"a": 1}}
    items = [HI, {"type": "message", "role": "assistant", "content": [said]}, call]
    text, ignored = await prompt_of(reads_calls, "/v1/responses", input=items)
    assert "well" in text
    assert ignored == "input[].content[].parsed, input[].parsed_arguments"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
@pytest.mark.parametrize("more", [{}, {"reasoning_content": "hm"}])
async def test_an_assistant_may_have_said_nothing(model, content, more):
    messages = [HI, {"role": "assistant", **content, **more}, HI]
    text, _ = await prompt_of(model, "/v1/chat/completions", messages=messages)
    assert text == "<|bos|><|user|>hi<|assistant|><|user|>hi<|assistant|>"


async def test_others_must_have_said_something(model):
    for role in ("user", "system"):
        answer = await post(model, "/v1/chat/completions", messages=[{"role": role, "content": None}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


NULLS = [
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": None, "summary": None}}),
    ("/v1/responses", {"input": "hi", "text": {"format": None, "verbosity": None}}),
    ("/v1/responses", {"input": "hi", "stream": True, "stream_options": {"include_obfuscation": None}}),
    ("/v1/chat/completions", {"messages": [HI], "stream": True, "stream_options": {"include_usage": None}}),
    ("/v1/chat/completions", {"messages": [{**HI, "name": None, "audio": None, "function_call": None}]}),
    ("/v1/chat/completions", {"messages": [HI], "response_format": {"type": "text", "json_schema": None}}),
    ("/v1/chat/completions", {"messages": [HI], "chat_template_kwargs": {"thinking": None, "other": None}}),
    ("/v1/completions", {"prompt": "hi", "stream": True, "stream_options": {"continuous_usage_stats": None}}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a", "json": None, "whitespace": None}}),
]


@pytest.mark.parametrize(("path", "body"), NULLS, ids=str)
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_null_counts_as_not_sent_however_deep(model, strict, path, body, refuses):
    answer = await post(strict if refuses else model, path, **body)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text


async def test_nulls_inside_a_schema_are_parts_of_it(model):
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
    source = saying(model, "{}")
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": None}}
    answer = await post(model, "/v1/chat/completions", source, messages=[HI], response_format=wanted)
    assert answer.status_code == 200, answer.text
    assert source.requests[0].params.structured.text.count("null") == 2


async def test_what_a_response_says_of_its_settings_can_be_sent_again(strict):
    body = (await post(strict, "/v1/responses", input="hi", temperature=0.5)).json()
    answered = {"id", "object", "created_at", "completed_at", "status", "error", "incomplete_details", "output"}
    settings = {name: body[name] for name in body.keys() - answered - {"model", "usage"}}
    answer = await post(strict, "/v1/responses", input="hi", **settings)
    assert answer.status_code == 200, answer.text


STILL_REFUSED = [
    ("/v1/chat/completions", {"messages": [HI], "store": True}, "store"),
    ("/v1/chat/completions", {"messages": [HI], "verbosity": "loud"}, "verbosity"),
    ("/v1/chat/completions", {"messages": [HI], "reasoning_effort": "lots"}, "reasoning_effort"),
    ("/v1/chat/completions", {"messages": [HI], "service_tier": 1}, "service_tier"),
    ("/v1/chat/completions", {"messages": [HI], "documents": [{"text": "x"}]}, "documents"),
    ("/v1/chat/completions", {"messages": [HI], "top_logprobs": 3}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [HI], "whatever": None}, "whatever"),
    ("/v1/chat/completions", {"messages": [{**HI, "name": 5}]}, "messages[0].name"),
    ("/v1/completions", {"prompt": "hi", "store": True}, "store"),
    ("/v1/completions", {"prompt": "hi", "stop": [3]}, "stop"),
    ("/v1/completions", {"prompt": "hi", "stop": [""] * 17}, "stop"),
    ("/v1/chat/completions", {"messages": [{**HI, "first": [], "second": 2}]}, "messages[0].second"),
    ("/v1/embeddings", {"input": "hi", "store": True}, "store"),
    ("/v1/responses", {"input": "hi", "store": "yes"}, "store"),
    ("/v1/responses", {"input": "hi", "reasoning": {"summary": "long"}}, "reasoning.summary"),
    ("/v1/responses", {"input": "hi", "include": ["everything"]}, "include[0]"),
    ("/v1/responses", {"input": "hi", "truncation": "auto"}, "truncation"),
]


@pytest.mark.parametrize(("path", "body", "param"), STILL_REFUSED, ids=str)
async def test_what_would_change_the_answer_or_is_wrong_is_refused(model, path, body, param):
    answer = await post(model, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_usage_in_each_chunk_without_the_last_one_is_not_told(model):
    options = {"continuous_usage_stats": True}
    answer = await post(model, "/v1/completions", prompt="hi", stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in events(answer.text)[:-1])


async def test_logprobs_are_not_told_of_a_response_that_asks_for_other_things(model):
    answer = await post(model, "/v1/responses", input="hi", include=["reasoning.encrypted_content"])
    assert answer.json()["output"][0]["content"][0]["logprobs"] == []


ROWS = [
    (CHAT, {"messages": [{**HI, "name": "Bob"}], "stop": ""}, {"messages[].name", "stop"}),
    (COMPLETIONS, {"prompt": "hi", "store": False}, {"store"}),
    (EMBEDDINGS, {"input": "hi", "service_tier": "auto"}, {"service_tier"}),
]


@pytest.mark.parametrize(("url", "body", "names"), ROWS, ids=[url for url, *_ in ROWS])
def test_rows_of_a_batch_are_taken_and_what_they_hint_is_logged_once(model, strict, caplog, url, body, names):
    preparer = Preparer(model, "job", 0, 1)
    with caplog.at_level(logging.INFO, "cluster.batch.row_requests"):
        for row in range(3):
            assert preparer.prepare(Task(row, f"row-{row}", url, {"model": MODEL, **body})).requests
    assert len(caplog.messages) == len(names)
    assert all(any(name in message for message in caplog.messages) for name in names)
    with pytest.raises(InvalidRequestError):
        Preparer(strict, "job", 0, 1).prepare(Task(0, "row-0", url, {"model": MODEL, **body}))
