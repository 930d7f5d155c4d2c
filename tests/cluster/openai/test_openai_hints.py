"""What a refusal says to a client that was written for another server: the field that does it here."""

import pytest

from tests.openai_app import MODEL, app_for, client_for, saying, served_model

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def refusal(model, path, body):
    source = saying(model, "ok")
    async with client_for(app_for(source, model)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert not source.requests
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param", "hint"),
    [
        (
            "/v1/completions",
            {**TEXT, "response_format": {"type": "text"}},
            "response_format",
            "use structured_outputs",
        ),
        ("/v1/completions", {**TEXT, "max_completion_tokens": 3}, "max_completion_tokens", "use max_tokens"),
        ("/v1/completions", {**TEXT, "tools": [TOOL]}, "tools", "use chat completions"),
        ("/v1/completions", CHAT, "messages", "use prompt"),
        ("/v1/chat/completions", TEXT, "prompt", "use messages"),
        ("/v1/chat/completions", {**CHAT, "extra_body": {"top_k": 1}}, "extra_body", "beside the other fields"),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, "model", "GET /v1/models"),
        ("/tokenize", {"text": "hi"}, "text", "use prompt"),
    ],
)
async def test_a_field_of_elsewhere_is_refused_with_the_one_of_here(model, path, body, param, hint):
    error = await refusal(model, path, body)
    assert error["param"] == param
    assert hint in error["message"]


async def test_an_unknown_field_inside_a_field_is_refused_with_the_known_ones(model):
    error = await refusal(model, "/v1/completions", {**TEXT, "structured_outputs": {"choices": ["a"]}})
    assert error["param"] == "structured_outputs.choices"
    assert error["message"].endswith("use one of json, regex, choice, grammar, json_object")
    deeper = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "title": "t"}}
    error = await refusal(model, "/v1/chat/completions", {**CHAT, "response_format": deeper})
    assert error["message"] == "response_format.json_schema.title is not supported; leave it out"


async def test_a_wrong_tool_choice_shows_how_a_function_is_named(model):
    error = await refusal(model, "/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "any"})
    assert "or {'type': 'function', 'function': {'name': ...}}" in error["message"]
    assert "{{" not in error["message"]


async def test_without_a_parser_tools_point_to_the_flag_and_to_the_template(model):
    error = await refusal(model, "/v1/chat/completions", {**CHAT, "tools": [TOOL]})
    assert "--tool-call-parser" in error["message"]
    assert "if its chat template reads tools" in error["message"]


async def test_a_wrong_path_or_method_is_told_what_there_is(model):
    async with client_for(app_for(saying(model, "ok"), model)) as client:
        lost, wrong = await client.get("/"), await client.get("/v1/completions")
    assert (lost.status_code, wrong.status_code) == (404, 405)
    assert "/openapi.json" in lost.json()["error"]["message"]
    assert wrong.json()["error"]["message"] == "GET is not allowed here; use POST"
