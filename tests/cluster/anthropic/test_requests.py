"""Requests of `/v1/messages`: what the model reads of them, what is refused by which name, what only hints."""

import json
from dataclasses import replace

import pytest

from cluster.openai.parsers.reasoning import Qwen3Parser
from tests.cluster.anthropic.messages_lab import (
    ASKED,
    CALL,
    SYSTEM_FIRST,
    TOOL,
    USER,
    model_with,
    post,
    prompt_of,
    whole,
)
from tests.openai_app import app_for, client_for, saying

USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "11 degrees"}
TEXT = {"type": "text", "text": "a"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("messages"))


@pytest.fixture(scope="module")
def system_first(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("first"), SYSTEM_FIRST)


async def read(model, **fields):
    """What the model reads."""
    source = saying(model, "ok")
    await whole(source, model, **fields)
    return prompt_of(source, model)


def said(role, *content):
    return {"role": role, "content": list(content)}


async def test_system_and_turns_are_a_chat(model):
    turns = [USER, {"role": "assistant", "content": "hello"}, said("user", TEXT, {"type": "text", "text": "b"})]
    assert await read(model, messages=turns, system="be kind") == (
        "<system>be kind<user>hi<assistant>hello<user>a\nb<assistant>"
    )


async def test_turns_of_one_role_are_one_turn(model):
    turns = [USER, said("user", TEXT), said("assistant", TEXT), {"role": "assistant", "content": "b"}, USER]
    assert await read(model, messages=turns) == "<user>hi\na<assistant>a\nb<user>hi<assistant>"


async def test_tools_are_used_over_turns(model):
    turns = [
        USER,
        said("assistant", {"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT, USE),
        said("user", RESULT, {"type": "text", "text": "so?"}),
    ]
    text = await read(model, messages=turns, tools=[TOOL])
    head, _, rest = text.partition("<user>hi")
    assert json.loads(head.removeprefix("[tools]"))[0]["function"]["parameters"] == TOOL["input_schema"]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": USE["input"]}}
    assert rest.startswith("<assistant>(hm)a[")
    assert json.loads(rest[rest.index("[") : rest.index("]") + 1]) == [call]
    assert rest.endswith("<tool>11 degrees@toolu_1<user>so?<assistant>")


@pytest.mark.parametrize(
    "content", ["11 degrees", [{"type": "text", "text": "11"}, {"type": "text", "text": "C"}], None]
)
async def test_results_of_tools_are_texts(model, content):
    result = RESULT | {"content": content}
    if content is None:
        del result["content"]
    text = await read(model, messages=[USER, said("assistant", USE), said("user", result)], tools=[TOOL])
    shown = {str: content, list: "11\nC", type(None): ""}[type(content)]
    assert text.endswith(f"<tool>{shown}@toolu_1<assistant>")


async def test_the_model_goes_on_with_a_last_message_of_its_own(model):
    turns = [USER, {"role": "assistant", "content": "The answer is"}]
    assert (await read(model, messages=turns)).endswith("<user>hi<assistant>The answer is")


async def test_reminders_of_the_system_stand_where_they_are_or_where_the_template_takes_them(model, system_first):
    turns = [USER, {"role": "system", "content": "be brief"}, said("user", TEXT)]
    assert await read(model, messages=turns, system="be kind") == (
        "<system>be kind<user>hi<system>be brief<user>a<assistant>"
    )
    assert await read(system_first, messages=turns, system="be kind") == (
        "<system>be kind\nbe brief<user>hi\na<assistant>"
    )
    assert await read(system_first, messages=turns) == "<system>be brief<user>hi\na<assistant>"


async def test_a_text_for_the_bill_does_not_change_the_prompt(model):
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0f3a1"}
    answer = await post(saying(model, "ok"), model, system=[bill, TEXT])
    assert answer.headers["x-squadron-ignored"] == "system[]"
    assert await read(model, system=[bill, TEXT]) == "<system>a<user>hi<assistant>"


@pytest.mark.parametrize(
    ("choice", "calls"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "none"}, False)],
)
async def test_a_call_can_be_forced_or_forbidden(model, choice, calls):
    source = saying(model, "ok")
    await post(source, model, tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True})
    request = source.requests[0]
    assert (request.params.structured is not None) == calls
    assert ("[tools]" in prompt_of(source, model)) == calls


async def test_what_else_is_asked_for_reaches_the_engine(model):
    source = saying(model, "ok")
    wanted = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["x"],
        "seed": 3,
        "output_config": wanted,
    }
    await post(source, model, **fields, metadata={"user_id": "me"})
    params = source.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 7, ("x",))
    assert params.structured.kind == "json_schema"
    assert source.requests[0].seed == 3
    assert prompt_of(source, model).endswith("[effort low]")


async def test_thinking_is_turned_off_by_the_template(model):
    assert (await read(model, thinking={"type": "disabled"})).endswith("<assistant><think></think>")
    for wanted in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000}):
        assert (await read(model, thinking=wanted)).endswith("<assistant>")


async def test_what_only_hints_is_named(system_first, model):
    """As a coding agent sends it."""
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [USER, said("assistant", TEXT | cached, USE), said("user", RESULT | cached | {"is_error": True})]
    answer = await post(
        saying(model, "ok"),
        model,
        messages=turns,
        tools=[TOOL | cached | {"eager_input_streaming": True}],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 31_999},
        service_tier="auto",
        system=[TEXT | cached],
    )
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-squadron-ignored"].split(", ")) == {
        "context_management",
        "messages[].content[].cache_control",
        "messages[].content[].is_error",
        "system[].cache_control",
        "thinking.budget_tokens",
        "tools[].cache_control",
        "tools[].eager_input_streaming",
    }
    unread = await post(saying(model, "ok"), system_first, thinking={"type": "disabled"})
    assert unread.headers["x-squadron-ignored"] == "thinking"
    strict = replace(model, strict_fields=True)
    refused = await post(saying(model, "ok"), strict, thinking={"type": "enabled", "budget_tokens": 31_999})
    assert refused.json()["error"]["param"] == "thinking.budget_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [USER, said("user")]}, "messages[1].content"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [said("user", {"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [said("user", USE)]}, "messages[0].content[0].type"),
        ({"messages": [said("user", {"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [said("user", TEXT | {"size": 1})]}, "messages[0].content[0].size"),
        ({"messages": [said("user", RESULT | {"content": [1]})]}, "messages[0].content[0].content[0]"),
        ({"messages": [USER, said("assistant", USE | {"input": []})]}, "messages[1].content[0].input"),
        ({"messages": [USER, said("assistant", USE)]}, "messages[1]"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"stop_sequences": [""] * 17}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_token": 3}, "max_token"),
        ({"temperature": "hot"}, "temperature"),
    ],
)  # fmt: skip
async def test_the_first_wrong_field_is_named(model, fields, param):
    source = saying(model, "x")
    answer = await post(source, model, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert answer.json()["type"] == "error"
    assert not source.requests


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 2**40}, "max_tokens must be between 1 and 2147483647, not 1099511627776"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens must be between 1 and "),
        ({"tool_choice": {"type": "any"}}, "tool_choice of type 'any' needs tools to choose from"),
    ],
)
async def test_what_is_said_of_it_is_so_and_in_this_apis_words(model, fields, words):
    answer = await post(saying(model, "x"), model, **fields)
    assert answer.json()["error"]["message"].startswith(words)


async def test_an_agent_may_have_the_tools_of_many_servers(model):
    tools = [TOOL | {"name": f"mcp__server{i // 50}__tool{i}"} for i in range(300)]
    source = saying(model, "ok")
    answer = await post(source, replace(model, max_model_len=200_000), tools=tools)
    assert answer.status_code == 200, answer.text
    assert prompt_of(source, model).count("mcp__server") == 300


async def test_blocks_whose_fields_are_null_are_as_without_them(model):
    def turns(use, result):
        return [USER, said("assistant", USE | use), said("user", RESULT | result)]

    bare = [{name: value for name, value in one.items() if name not in ("input", "content")} for one in (USE, RESULT)]
    read_null = await read(model, messages=turns({"input": None}, {"content": None}))
    assert read_null == await read(model, messages=[USER, said("assistant", bare[0]), said("user", bare[1])])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_numbers_that_json_has_not_are_refused_by_the_place_of_their_call(model, number):
    body = json.dumps(
        ASKED | {"messages": [USER, said("assistant", USE | {"input": {"n": 17}}), said("user", RESULT)]}
    )
    async with client_for(app_for(saying(model, "x"), model)) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/messages", content=body.replace("17", number), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].content[0].input")


async def test_the_assistant_may_have_said_nothing(model):
    turns = [USER, said("assistant"), USER]
    assert await read(model, messages=turns) == "<user>hi<assistant><user>hi<assistant>"


async def test_a_bound_on_thinking_where_nothing_is_thought_is_named(model):
    thinker = replace(model, reasoning_parser=Qwen3Parser)
    thinking = {"type": "enabled", "budget_tokens": 9}
    formats = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    for fields in (formats, {"tools": [TOOL], "tool_choice": {"type": "any"}}):
        answer = await post(saying(model, "ok"), thinker, thinking=thinking, **fields)
        assert answer.headers["x-squadron-ignored"] == "thinking.budget_tokens"
        strict = await post(saying(model, "ok"), replace(thinker, strict_fields=True), thinking=thinking, **fields)
        assert strict.json()["error"]["param"] == "thinking.budget_tokens"


async def test_a_template_without_tools_refuses_them_by_their_place(system_first):
    answer = await post(saying(system_first, "x"), system_first, tools=[TOOL])
    assert answer.json()["error"]["param"] == "tools"
    turns = [USER, said("assistant", TEXT, USE), said("user", RESULT)]
    answer = await post(saying(system_first, "x"), system_first, messages=turns)
    assert answer.json()["error"]["param"] == "messages[1].content[1]"


async def test_tokens_are_counted_as_they_are_used(model):
    fields = {"system": "be kind", "tools": [TOOL], "messages": [USER, said("assistant", USE), said("user", RESULT)]}
    body = await whole(saying(model, CALL), model, **fields)
    async with client_for(app_for(saying(model, "x"), model)) as client:
        asked = {name: value for name, value in (ASKED | fields).items() if name != "max_tokens"}
        counted = await client.post("/v1/messages/count_tokens", json=asked)
        refused = await client.post("/v1/messages/count_tokens", json=asked | {"system": [{"type": "image"}]})
    assert counted.json() == {
        "input_tokens": body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]
    }
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "system[0]")
