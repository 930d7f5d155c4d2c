"""The responses API: strict types of the openai package, order of events, calls, thinking, and what is refused."""

import json
from dataclasses import replace

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.errors import ApiError
from cluster.openai import response_output as writer
from cluster.openai.parsers.reasoning import DeepSeekR1Parser
from cluster.openai.parsers.tool_formats import HermesParser
from cluster.openai.response_fields import ResponseFields
from engine.errors import InvalidRequestError, PromptTooLongError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, saying, served_model, serving

EVENT = TypeAdapter(ResponseStreamEvent)
TOOL_TEMPLATE = (
    "{%- if tools -%}{{- '[tools]' + tools | tojson -}}{%- endif -%}{%- for message in messages -%}"
    "{{- '<|' + (message['role'] if message['role'] != 'tool' else 'user') + '|>' + message['content'] -}}"
    "{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}"
    "{%- if message.tool_call_id -%}{{- '@' + message.tool_call_id -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


@pytest.fixture(scope="module")
def tool_model(model, tmp_path_factory):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("tools"), TOOL_TEMPLATE)
    return replace(model, tokenizer=Tokenizer(str(folder)), tool_parser=HermesParser)


async def post(source, model, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


async def whole(source, model, **fields):
    answer = await post(source, model, **fields)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json(), strict=True)


async def stream(source, model, **fields):
    """The events of a stream, each checked against the package's own type, without ids and sequence numbers."""
    answer = await post(source, model, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


def prompt_of(source, model):
    return model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)


async def test_a_response_is_what_the_openai_types_expect(model):
    source = saying(model, "hello 🙂 world", cached=2)
    body = await whole(source, model, instructions="be kind", metadata={"a": "b"}, user="u", max_output_tokens=100)
    assert body.output_text == "hello 🙂 world"
    assert (body.status, body.error, body.incomplete_details) == ("completed", None, None)
    assert (body.instructions, body.metadata, body.max_output_tokens) == ("be kind", {"a": "b"}, 100)
    assert body.id.startswith("resp_")
    assert body.id == source.requests[0].request_id
    assert body.usage.input_tokens == len(source.requests[0].prompt_token_ids)
    assert body.usage.output_tokens == len(model.tokenizer.encode("hello 🙂 world")) + 1
    assert body.usage.total_tokens == body.usage.input_tokens + body.usage.output_tokens
    assert body.usage.input_tokens_details.cached_tokens == 2
    assert prompt_of(source, model) == "<|bos|><|system|>be kind<|user|>hi<|assistant|>"


async def test_a_stream_tells_its_events_in_openais_order(model):
    events = await stream(saying(model, "héllo 🚀 you"), model)
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "héllo 🚀 you"
    assert len(deltas) > 3
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names == [*before, *["output_text.delta"] * len(deltas), *after]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert events[0]["response"]["status"] == "in_progress"


async def test_a_stream_may_be_asked_for_the_usage_that_it_tells_anyway(model):
    for options in (None, {"include_usage": True, "include_obfuscation": False}):
        events = await stream(saying(model, "hello"), model, stream_options=options)
        assert events[-1]["response"]["usage"]["output_tokens"] > 0


def without_ids(value):
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {
            k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")
        }
    return value


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 3}, {"include": ["message.output_text.logprobs"]}])
async def test_the_last_event_of_a_stream_is_the_whole_answer(model, fields):
    answer = (await post(saying(model, "hello world"), model, **fields)).json()
    events = await stream(saying(model, "hello world"), model, **fields)
    assert without_ids(events[-1]["response"]) == without_ids(answer)


async def test_an_output_that_reaches_its_limit_is_incomplete(model):
    body = await whole(saying(model, "hello world"), model, max_output_tokens=2)
    assert (body.status, body.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert body.output[0].status == "incomplete"
    events = await stream(saying(model, "hello world"), model, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"


async def test_an_answer_without_text_has_an_empty_message(model):
    body = await whole(saying(model, ""), model)
    assert [(item.type, item.content[0].text) for item in body.output] == [("message", "")]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_logprob_is_encoded_once_although_four_events_tell_of_it(model, monkeypatch, stream):
    encoded = []

    def counted(value):
        encoded.append("top_logprobs" in value)
        return encode(value)

    encode = writer._encode
    monkeypatch.setattr(writer, "_encode", counted)
    fields = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    async with client_for(app_for(saying(model, "abc"), model)) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, **fields})
    assert answer.text.count('"top_logprobs":[{') == (4 * 3 + 3 if stream else 3)
    assert sum(encoded) == 3


async def test_logprobs_come_with_the_text_when_they_are_asked_for(model):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    entries = (await whole(saying(model, "a🚀b"), model, **fields)).output[0].content[0].logprobs
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "a🚀b"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = await stream(saying(model, "a🚀b"), model, **fields)
    streamed = [entry for event in events if event["type"].endswith(".delta") for entry in event["logprobs"]]
    assert [one["token"] for one in streamed] == [entry.token for entry in entries]


async def test_messages_calls_and_their_outputs_become_turns_of_the_chat(tool_model):
    source = saying(tool_model, "ok")
    given = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "how is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "let me see", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}',
         "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]  # fmt: skip
    await whole(source, tool_model, input=given)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    text = prompt_of(source, tool_model)
    head, _, rest = text.partition("[{")
    assert head == "<|system|>be kind<|user|>how is it?<|assistant|>let me see"
    told, end = json.JSONDecoder().raw_decode("[{" + rest)
    assert told == calls
    assert ("[{" + rest)[end:] == "<|user|>rain@c1<|user|>sun@c2<|assistant|>"


async def test_what_was_put_out_can_be_put_in_again(tool_model):
    first = await whole(saying(tool_model, f"well {CALL}"), tool_model, tools=TOOLS)
    items = [item.model_dump(mode="json") for item in first.output]
    again = saying(tool_model, "ok")
    await whole(again, tool_model, input=[{"role": "user", "content": "hi"}, *items])
    assert "well" in prompt_of(again, tool_model)
    assert first.output[1].call_id in prompt_of(again, tool_model)


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_calls_are_items_of_their_own(tool_model, choice):
    fields = {"tools": TOOLS} | ({"tool_choice": choice} if choice else {})
    body = await whole(saying(tool_model, f"Let me see.\n{CALL}\n{CALL}"), tool_model, **fields)
    assert [item.type for item in body.output] == ["message", "function_call", "function_call"]
    assert body.output_text == "Let me see."
    call = body.output[1]
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Köln"}, "completed")
    assert call.call_id != body.output[2].call_id
    assert body.tools[0].name == "weather"


async def test_a_stream_tells_arguments_in_pieces(tool_model):
    events = await stream(saying(tool_model, CALL), tool_model, tools=TOOLS)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert len(pieces) > 2
    assert "".join(pieces) == done["arguments"] == '{"city": "Köln"}'
    assert events[-1]["response"]["output"][0]["arguments"] == done["arguments"]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Köln"}}]'),
        ({"type": "function", "name": "weather"}, '{"city": "Köln"}'),
    ],
)
async def test_a_forced_call_is_bound_by_a_grammar(tool_model, choice, text):
    source = saying(tool_model, text)
    body = await whole(source, tool_model, tools=TOOLS, tool_choice=choice)
    assert [(item.type, item.name, item.arguments) for item in body.output] == [
        ("function_call", "weather", '{"city": "Köln"}')
    ]
    assert source.requests[0].params.structured.kind == "json_schema"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Ulm"}}, {"name": "weather", "parameters": {}}]'),
        ({"type": "function", "name": "weather"}, '{"city": "Ulm"}'),
    ],
)
async def test_a_forced_call_that_the_limit_cuts_has_no_text(tool_model, choice, text):
    for limit in range(1, len(tool_model.tokenizer.encode(text)) + 1):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": limit}
        body = await whole(saying(tool_model, text), tool_model, **fields)
        events = await stream(saying(tool_model, text), tool_model, **fields)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(
            [item.model_dump(mode="json", exclude_unset=True) for item in body.output]
        )
        assert (body.output_text, body.status) == ("", "incomplete")
        assert {event["type"] for event in events} & {"response.output_text.delta"} == set()
        for call in body.output:
            complete = call.type == "function_call" and call.arguments in ('{"city": "Ulm"}', "{}")
            assert call.status == ("completed" if complete else "incomplete")


async def test_beside_a_format_of_the_text_the_output_is_a_call_or_matches_it(tool_model):
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    source = saying(tool_model, CALL)
    body = await whole(source, tool_model, tools=TOOLS, text=text)
    assert [(item.type, item.arguments) for item in body.output] == [("function_call", '{"city": "Köln"}')]
    assert source.requests[0].params.structured.kind == "calls_or_json"
    body = await whole(saying(tool_model, '{"city": "Ulm"}'), tool_model, tools=TOOLS, text=text)
    assert (body.output_text, len(body.output)) == ('{"city": "Ulm"}', 1)
    forced = saying(tool_model, '{"city": "Bonn"}')
    choice = {"type": "function", "name": "weather"}
    body = await whole(forced, tool_model, tools=TOOLS, text=text, tool_choice=choice)
    assert [(item.type, item.arguments) for item in body.output] == [("function_call", '{"city": "Bonn"}')]


async def test_a_schema_of_the_text_reaches_the_engine(model):
    source = saying(model, "{}")
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    body = await whole(source, model, text=text)
    assert json.loads(source.requests[0].params.structured.text) == SCHEMA
    assert body.text.format.name == "place"


async def test_thinking_is_an_item_of_its_own_and_counted(model):
    thinker = replace(model, reasoning_parser=DeepSeekR1Parser)
    text = "hm, let me\n</think>\n\nTwo."
    body = await whole(saying(model, text), thinker)
    assert [item.type for item in body.output] == ["reasoning", "message"]
    assert body.output[0].content[0].text == "hm, let me"
    assert body.output_text == "Two."
    assert 0 < body.usage.output_tokens_details.reasoning_tokens < body.usage.output_tokens
    events = await stream(saying(model, text), thinker)
    thought = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(thought) == "hm, let me"


async def test_settings_reach_the_engine(model):
    source = saying(model, "ok")
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["x"], "max_output_tokens": 20}
    await whole(source, model, **sent)
    params = source.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 5, 7)
    assert (params.stop, params.max_tokens) == (("x",), 20)


BAD = [
    ({"store": "yes"}, "store"),
    ({"previous_response_id": 1}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": "yes"}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": 1}, "service_tier"),
    ({"max_tool_calls": "few"}, "max_tool_calls"),
    ({"whatever": 1}, "whatever"),
    ({"include": ["everything"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 30}, "top_logprobs"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": False}}, "stream_options.include_usage"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -5}, "top_k"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x", "name": 5}]}, "input[0].name"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "detail": "high"}]}]},
        "input[0].content[0].detail",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": "none", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"tools": TOOLS}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ({"tools": [*TOOLS, *TOOLS], "tool_choice": "required"}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": 5}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS * 1200, "tool_choice": "required"}, "tools"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_what_is_wrong_is_refused_by_the_name_that_this_api_has_for_it(model, fields, param):
    source = saying(model, "ok")
    answer = await post(source, model, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert not source.requests
    for word in ("messages", "max_completion_tokens", "response_format", "reasoning_effort", ".function.", "{{"):
        assert word not in error["message"]


TURN = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "well"}


def called(**changes):
    return {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"} | changes


def returned(**changes):
    return {"type": "function_call_output", "call_id": "c1", "output": "rain"} | changes


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ([TURN, called(arguments="no")], ("input", 1, "arguments")),
        ([TURN, called(), called(arguments="[]")], ("input", 2, "arguments")),
        ([TURN, SAID, called(), called(arguments="no")], ("input", 3, "arguments")),
        ([TURN, called(), returned(), returned(), called(arguments="")], None),
        ([TURN, called(), returned(output=[{"type": "input_image"}])], ("input", 2, "output", 0)),
        ([TURN, returned(call_id=5)], ("input", 1, "call_id")),
    ],
)
async def test_a_wrong_item_is_named_by_the_path_that_was_sent(tool_model, given, path):
    answer = await post(saying(tool_model, "ok"), tool_model, input=given)
    if path is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    named = "".join([f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]).lstrip(".")
    assert error["param"] == named
    assert error["message"].startswith(f"{named} ")


@pytest.mark.parametrize(
    ("given", "param"),
    [([TURN, SAID, called()], "input[2]"), ([TURN, called()], "input[1]"), ([TURN, returned()], "input[1].type")],
)
async def test_an_item_that_the_template_cannot_take_is_named(model, given, param):
    error = (await post(saying(model, "ok"), model, input=given)).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_every_field_of_the_openai_client_is_known_by_name(model):
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    from cluster.openai.response_fields import REFUSED_RESPONSE

    known = {*ResponseFields.model_fields, *REFUSED_RESPONSE}
    assert set(ResponseCreateParamsBase.__annotations__) - known == set()


async def test_a_prompt_that_the_engine_refuses_is_the_clients_input(model):
    source = saying(model, "x", hold=0, error=PromptTooLongError("prompt does not fit the cache"))
    answer = await post(source, model)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_own_status(model, streamed):
    source = saying(model, "x", hold=0, error=ApiError("overloaded", "the queue is full", retry_after=7))
    answer = await post(source, model, stream=streamed)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


async def test_a_grammar_that_the_engine_refuses_is_told_by_the_clients_field(model):
    source = saying(model, "x", hold=0, error=InvalidRequestError("no such thing", "structured"))
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    answer = await post(source, model, text=text)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


async def test_an_error_in_mid_stream_ends_the_response_as_failed(model):
    source = saying(model, "hello", hold=2, error=ApiError("replica_lost", "no replica is left"))
    answer = await post(source, model, stream=True)
    failed, error = [json.loads(block.split("\ndata: ")[1]) for block in answer.text.split("\n\n")[-3:-1]]
    EVENT.validate_python(failed, strict=True)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"] == "no replica is left"
    assert (error["type"], error["code"]) == ("error", "replica_lost")
    assert error["error"]["request_id"] == failed["response"]["id"]


async def test_the_real_openai_client_is_served(model, tool_model):
    source = saying(tool_model, f"hello {CALL}")
    async with (
        serving(app_for(source, tool_model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        asked = {"model": MODEL, "input": "hi", "tools": TOOLS}
        answer = await client.responses.create(**asked)
        assert answer.output_text == "hello"
        assert answer.output[1].name == "weather"
        async with client.responses.stream(**asked) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[-1] == "response.completed"
        assert final.output_text == "hello"
        assert json.loads(final.output[1].arguments) == {"city": "Köln"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="x", conversation="c")
        assert caught.value.body["param"] == "conversation"


async def test_the_real_openai_client_hears_of_an_error_in_mid_stream(model):
    source = saying(model, "hello", hold=2, error=ApiError("replica_lost", "no replica is left"))
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIError, match="no replica is left"):
            async for _ in await client.responses.create(model=MODEL, input="x", stream=True):
                pass
