"""Chats with tools and with thinking as the openai package sees them: whole, streamed, forced, several choices."""

import json
from dataclasses import replace

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken

from cluster.openai.parsers.reasoning import DeepSeekR1Parser
from cluster.openai.parsers.tool_formats import HermesParser, MistralParser
from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model, serving

TEMPLATE = (
    "{%- if tools -%}{{- '[tools]' + tools | tojson -}}{%- endif -%}{%- for message in messages -%}"
    "{{- '<|user|>' + message['role'] + ':' + message['content'] -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function.arguments.city -}}{%- endfor -%}"
    "{%- if message.tool_call_id -%}{{- '@' + message.tool_call_id -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🚀"}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln 🚀"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    backend = tiny_tokenizer.byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    folder = tiny_tokenizer.save(backend, tmp_path_factory.mktemp("tools"), TEMPLATE)
    plain = served_model(tmp_path_factory.mktemp("plain"), max_model_len=4096)
    return replace(plain, tokenizer=Tokenizer(str(folder)), tool_parser=HermesParser)


async def post(source, model, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post("/v1/chat/completions", json={"model": MODEL, **CHAT, **fields})


async def whole(source, model, **fields):
    answer = await post(source, model, **fields)
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate(answer.json(), strict=True).choices


async def streamed(source, model, **fields):
    """Each choice put together from its chunks: content, thinking, calls, finish reasons."""
    answer = await post(source, model, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    choices = {}
    for chunk in events(answer.text)[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        (choice,) = chunk["choices"]
        one = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "reasons": []})
        delta = choice["delta"]
        one["content"] += delta.get("content") or ""
        one["reasoning"] += delta.get("reasoning_content") or ""
        one["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                assert call["index"] == len(one["calls"])
                assert (call["type"], set(call["function"])) == ("function", {"name", "arguments"})
                one["calls"].append([call["function"]["name"], ""])
            one["calls"][call["index"]][1] += call["function"]["arguments"]
    return [choices[index] for index in sorted(choices)]


def prompt_of(source, model):
    return model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("chunk", [1, 5, 100])
async def test_calls_are_told_apart_from_content_whole_and_streamed(model, chunk):
    texts = (f"Let me see.\n{CALL}\n{CALL}", "No call.")
    choices = await whole(saying(model, *texts, chunk=chunk), model, n=2)
    assert choices[0].message.content == "Let me see."
    assert [(call.type, call.function.name, call.function.arguments) for call in choices[0].message.tool_calls] == [
        ("function", "weather", ARGUMENTS)
    ] * 2
    assert len({call.id for call in choices[0].message.tool_calls}) == 2
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop"]
    assert (choices[1].message.content, choices[1].message.tool_calls) == ("No call.", None)
    first, second = await streamed(saying(model, *texts, chunk=chunk), model, n=2)
    assert (first["content"], first["reasons"]) == ("Let me see.", ["tool_calls"])
    assert first["calls"] == [["weather", ARGUMENTS]] * 2
    assert (second["content"], second["calls"], second["reasons"]) == ("No call.", [], ["stop"])


async def test_a_message_of_calls_alone_has_no_content(model):
    (choice,) = await whole(saying(model, CALL), model)
    assert choice.message.content is None
    assert choice.message.role == "assistant"


async def test_a_malformed_call_is_content_and_no_error(model):
    text = '<tool_call>{"name": "weather", "arguments": Köln}</tool_call>'
    (choice,) = await whole(saying(model, text), model)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


@pytest.mark.parametrize(
    ("choice", "text", "extra"),
    [
        ("required", f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]', {}),
        ("required", f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]', {"parallel_tool_calls": False}),
        ({"type": "function", "function": {"name": "weather"}}, ARGUMENTS, {}),
    ],
)
async def test_forced_calls_need_no_parser_and_are_bound_by_a_grammar(model, choice, text, extra):
    bare = replace(model, tool_parser=None)
    source = saying(bare, text)
    (found,) = await whole(source, bare, tool_choice=choice, **extra)
    assert [(call.function.name, call.function.arguments) for call in found.message.tool_calls] == [
        ("weather", ARGUMENTS)
    ]
    assert found.finish_reason == "tool_calls"
    schema = json.loads(source.requests[0].params.structured.text)
    assert (schema.get("maxItems") == 1) == bool(extra)
    (again,) = await streamed(saying(bare, text), bare, tool_choice=choice, **extra)
    assert (again["content"], again["calls"], again["reasons"]) == ("", [["weather", ARGUMENTS]], ["tool_calls"])


FORCED = [
    ("required", f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "weather", "parameters": {{}}}}]'),
    ({"type": "function", "function": {"name": "weather"}}, ARGUMENTS),
]


@pytest.mark.parametrize(("choice", "text"), FORCED)
async def test_a_forced_call_that_the_limit_cuts_has_no_content_whole_and_streamed(model, choice, text):
    lengths = set()
    for limit in range(1, len(model.tokenizer.encode(text)) + 1):
        cut = {"tool_choice": choice, "max_completion_tokens": limit}
        (found,) = await whole(saying(model, text), model, **cut)
        (again,) = await streamed(saying(model, text), model, **cut)
        assert (found.message.content or "", again["content"]) == ("", "")
        assert (found.finish_reason, again["reasons"]) == ("length", ["length"])
        calls = [[call.function.name, call.function.arguments] for call in found.message.tool_calls or []]
        assert again["calls"] == calls
        assert ARGUMENTS.startswith(calls[0][1].rstrip("\ufffd") if calls else "")
        lengths.add(len(calls[0][1]) if calls else -1)
    assert {1, len(ARGUMENTS)} < lengths


ANSWER = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
    }
}


@pytest.mark.parametrize("form", [ANSWER["response_format"], {"type": "json_object"}])
async def test_beside_a_response_format_an_answer_is_a_call_or_content(model, form):
    for text, content, calls in ((CALL, "", [["weather", ARGUMENTS]]), ('{"ok": true}', '{"ok": true}', [])):
        source = saying(model, text)
        (found,) = await whole(source, model, response_format=form)
        (again,) = await streamed(saying(model, text), model, response_format=form)
        assert source.requests[0].params.structured.kind == "calls_or_json"
        assert "[tools]" in prompt_of(source, model)
        told = [[call.function.name, call.function.arguments] for call in found.message.tool_calls or []]
        assert (found.message.content or "", told) == (again["content"], again["calls"]) == (content, calls)
        assert [found.finish_reason] == again["reasons"] == ["tool_calls" if calls else "stop"]


@pytest.mark.parametrize(("choice", "text"), FORCED)
async def test_a_forced_call_is_the_answer_whatever_the_response_format(model, choice, text):
    alone, beside = saying(model, text), saying(model, text)
    (found,) = await whole(alone, model, tool_choice=choice)
    (again,) = await whole(beside, model, tool_choice=choice, **ANSWER)
    assert beside.requests[0].params.structured == alone.requests[0].params.structured
    assert again.message.content is None
    assert [call.function for call in again.message.tool_calls] == [
        call.function for call in found.message.tool_calls
    ]


async def test_without_calls_a_response_format_binds_the_answer_alone(model):
    source = saying(model, '{"ok": true}')
    await whole(source, model, tool_choice="none", **ANSWER)
    assert source.requests[0].params.structured.kind == "json_schema"


async def test_a_response_format_that_cannot_be_enforced_beside_tools_is_told_by_its_own_name(model):
    refused = InvalidRequestError("json_schema at #/$defs/tool7: no", "structured")
    answer = await post(saying(model, "x", hold=0, error=refused), model, **ANSWER)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, "response_format", str(refused))


async def test_where_the_models_own_format_cannot_be_written_calls_are_a_list(model):
    mistral = replace(model, tool_parser=MistralParser)
    source = saying(mistral, f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
    (found,) = await whole(source, mistral, **ANSWER)
    assert [(call.function.name, call.function.arguments) for call in found.message.tool_calls] == [
        ("weather", ARGUMENTS)
    ]
    assert len(found.message.tool_calls[0].id) == 9
    assert "TOOL_CALLS" not in source.requests[0].params.structured.text
    assert source.requests[0].params.skip_special_tokens


async def test_one_call_ends_the_choice_where_more_are_not_allowed(model):
    source = saying(model, f"{CALL} and {CALL}")
    (found,) = await whole(source, model, parallel_tool_calls=False)
    assert len(found.message.tool_calls) == 1
    assert (found.message.content, found.finish_reason) == (None, "tool_calls")
    assert source.ended == [(source.requests[0].request_id, 0)]


async def test_none_keeps_the_tools_from_the_model_and_reads_no_calls(model):
    source = saying(model, CALL)
    (found,) = await whole(source, model, tool_choice="none")
    assert (found.message.content, found.message.tool_calls) == (CALL, None)
    assert "[tools]" not in prompt_of(source, model)


async def test_tools_and_earlier_calls_reach_the_template_as_objects(model):
    source = saying(model, "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await whole(source, model, messages=messages)
    head, _, rest = prompt_of(source, model).partition("<|user|>")
    assert json.loads(head.removeprefix("[tools]")) == TOOLS
    assert rest == "user:how is it?<|user|>assistant:Bonn<|user|>tool:rain@c1<|assistant|>"


async def test_an_answer_can_be_sent_back_as_it_came(model):
    (found,) = await whole(saying(model, f"well {CALL}"), model)
    source = saying(model, "ok")
    said = found.message.model_dump(mode="json")
    await whole(source, model, messages=[{"role": "user", "content": "hi"}, said])
    assert "assistant:wellKöln 🚀" in prompt_of(source, model)


async def test_a_marker_that_is_a_special_token_is_found(model):
    mistral = replace(model, tool_parser=MistralParser)
    (found,) = await whole(saying(model, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"), mistral)
    (call,) = found.message.tool_calls
    assert (call.function.arguments, len(call.id)) == (ARGUMENTS, 9)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "--tool-call-parser"),
        ({}, "tool_choice", "--tool-call-parser"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "other"),
    ],
)
async def test_what_needs_a_parser_is_refused_without_one(model, fields, param, words):
    answer = await post(saying(model, "x"), replace(model, tool_parser=None), **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_a_schema_that_cannot_be_enforced_is_told_by_the_tool_it_belongs_to(model):
    refused = InvalidRequestError('json_schema at #/$defs/tool0/properties/a: "format" is unknown', "structured")
    source = saying(model, "x", hold=0, error=refused)
    answer = await post(source, model, tool_choice="required")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert error["message"] == 'the parameters of weather at #/properties/a: "format" is unknown'


async def test_a_template_that_does_not_know_tools_is_told_by_name(model, tmp_path):
    plain = replace(served_model(tmp_path), tool_parser=HermesParser)
    answer = await post(saying(plain, "x"), plain)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_thinking_is_apart_from_content_and_calls(model):
    thinker = replace(model, reasoning_parser=DeepSeekR1Parser)
    text = f"hm, {CALL}?\n</think>\n\nYes.\n{CALL}"
    (found,) = await whole(saying(model, text), thinker)
    assert found.message.reasoning_content == f"hm, {CALL}?"
    assert found.message.content == "Yes."
    assert len(found.message.tool_calls) == 1
    (again,) = await streamed(saying(model, text), thinker)
    assert (again["reasoning"], again["content"]) == (f"hm, {CALL}?", "Yes.")
    assert again["calls"] == [["weather", ARGUMENTS]]


async def test_logprobs_are_told_for_every_token_of_a_call(model):
    ids = model.tokenizer.encode(CALL)
    (found,) = await whole(saying(model, CALL), model, logprobs=True)
    assert len(found.logprobs.content) == len(ids) + 1
    answer = await post(saying(model, CALL), model, logprobs=True, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(answer.text)[:-1]]
    assert sum(len(part["content"]) for part in parts if part) == len(ids) + 1


async def test_the_real_openai_client_gets_its_calls(model):
    source = saying(model, f"Let me see. {CALL}")
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(model=MODEL, **CHAT)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln 🚀"}
        async with client.chat.completions.stream(model=MODEL, **CHAT) as stream:
            kinds = {event.type async for event in stream}
            final = (await stream.get_final_completion()).choices[0]
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me see.")
        assert final.message.tool_calls[0].function.arguments == ARGUMENTS
