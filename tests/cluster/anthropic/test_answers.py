"""Answers of `/v1/messages`: the order of events, what each kind of block looks like, why a message ended."""

import json
from dataclasses import replace

import pytest

from cluster.anthropic.message_output import INVALID, input_of
from cluster.openai.parsers.reasoning import Qwen3Parser
from tests.cluster.anthropic.messages_lab import CALL, TOOL, joined, model_with, post, stream, whole
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, saying

THOUGHT = "<think>\nhm, so\n</think>\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("messages"))


@pytest.fixture(scope="module")
def thinker(model):
    return replace(model, reasoning_parser=Qwen3Parser)


def shape(events):
    """The events without ids, signatures and usage, deltas of one kind put together."""
    found = []
    for event in events:
        if event["type"] == "content_block_delta":
            ((name, piece),) = [(key, value) for key, value in event["delta"].items() if key != "type"]
            told = ["delta", event["index"], event["delta"]["type"], "signed" if name == "signature" else piece]
            if found and found[-1][:3] == told[:3]:
                found[-1][3] += piece
            else:
                found.append(told)
        elif event["type"] == "content_block_start":
            block = event["content_block"]
            found.append(["start", event["index"], {k: v for k, v in block.items() if k != "id"}])
        elif event["type"] == "content_block_stop":
            found.append(["stop", event["index"]])
        elif event["type"] == "message_delta":
            found.append(["message_delta", event["delta"]])
        else:
            found.append([event["type"]])
    return found


async def test_a_message_has_anthropics_fields(model):
    source = saying(model, "hello 🙂 world", cached=2)
    body = await whole(source, model)
    prompt, output = len(source.requests[0].prompt_token_ids), len(model.tokenizer.encode("hello 🙂 world")) + 1
    assert body == {
        "id": source.requests[0].request_id,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello 🙂 world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": output,
        },
    }
    assert body["id"].startswith("msg_")


async def test_a_stream_of_text(model):
    events = await stream(saying(model, "héllo 🚀", cached=1), model)
    assert shape(events) == [
        ["message_start"],
        ["ping"],
        ["start", 0, {"type": "text", "text": ""}],
        ["delta", 0, "text_delta", "héllo 🚀"],
        ["stop", 0],
        ["message_delta", {"stop_reason": "end_turn", "stop_sequence": None}],
        ["message_stop"],
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["output_tokens"] == 0
    assert start["usage"]["cache_read_input_tokens"] == 1
    assert end["usage"]["output_tokens"] == len(model.tokenizer.encode("héllo 🚀")) + 1
    assert sum(event["type"] == "content_block_delta" for event in events) > 3


async def test_a_stream_of_thoughts_text_and_two_calls(thinker):
    source = saying(thinker, f"{THOUGHT}Let me see.\n{CALL}\n{CALL}")
    events = await stream(source, thinker, tools=[TOOL])
    call = {"type": "tool_use", "name": "weather", "input": {}}
    assert shape(events) == [
        ["message_start"],
        ["ping"],
        ["start", 0, {"type": "thinking", "thinking": "", "signature": ""}],
        ["delta", 0, "thinking_delta", "hm, so"],
        ["delta", 0, "signature_delta", "signed"],
        ["stop", 0],
        ["start", 1, {"type": "text", "text": ""}],
        ["delta", 1, "text_delta", "Let me see."],
        ["stop", 1],
        ["start", 2, call],
        ["delta", 2, "input_json_delta", '{"city": "Köln"}'],
        ["stop", 2],
        ["start", 3, call],
        ["delta", 3, "input_json_delta", '{"city": "Köln"}'],
        ["stop", 3],
        ["message_delta", {"stop_reason": "tool_use", "stop_sequence": None}],
        ["message_stop"],
    ]
    ids = [event["content_block"]["id"] for event in events if event.get("content_block", {}).get("id")]
    assert len(set(ids)) == 2
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 3


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("hello world", {}),
        ("hello world", {"max_tokens": 3}),
        ("hello world", {"stop_sequences": ["wor"]}),
        (f"{THOUGHT}Yes: {CALL}", {"tools": [TOOL]}),
        (THOUGHT, {}),
        ("", {}),
        (" \n", {}),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(thinker, text, fields):
    body = await whole(saying(thinker, text), thinker, **fields)
    added = joined(await stream(saying(thinker, text), thinker, **fields))
    for one in (body, added):
        one["id"] = ""
        for block in one["content"]:
            block.update({name: "" for name in ("id", "signature") if name in block})
    assert added == body


async def test_an_answer_without_text_has_an_empty_block(model):
    assert (await whole(saying(model, ""), model))["content"] == [{"type": "text", "text": ""}]


async def test_space_before_a_call_is_no_text(model):
    body = await whole(saying(model, f"\n\n{CALL}"), model, tools=[TOOL])
    assert [block["type"] for block in body["content"]] == ["tool_use"]


@pytest.mark.parametrize(
    "wanted",
    [{"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, {"type": "adaptive", "display": "updates"}],
    ids=["omitted", "updates"],
)
async def test_thinking_that_is_not_to_be_shown_has_no_text(thinker, wanted):
    body = await whole(saying(thinker, f"{THOUGHT}Yes"), thinker, thinking=wanted)
    first, second = body["content"]
    assert (first["type"], first["thinking"], second["text"]) == ("thinking", "", "Yes")
    assert first["signature"]
    events = await stream(saying(thinker, f"{THOUGHT}Yes"), thinker, thinking=wanted)
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in events)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "stop"),
    [
        ("hello world", {}, "end_turn", None),
        ("hello world", {"max_tokens": 3}, "max_tokens", None),
        ("hello world", {"stop_sequences": ["zzz", "wor"]}, "stop_sequence", "wor"),
        (CALL, {"tools": [TOOL]}, "tool_use", None),
        (CALL, {"tools": [TOOL], "stop_sequences": ["</tool_call>"]}, "tool_use", None),
        (CALL, {"tools": [TOOL], "stop_sequences": ["Kö"]}, "stop_sequence", "Kö"),
        (CALL, {"tools": [TOOL], "max_tokens": 30}, "max_tokens", None),
        (CALL.partition("ln")[0], {"tools": [TOOL]}, "end_turn", None),  # the model ended in the middle of it
        (CALL.replace('"Köln"', "oops"), {"tools": [TOOL]}, "tool_use", None),  # its input says that it is no JSON
    ],
)
async def test_why_a_message_ended(model, text, fields, reason, stop):
    body = await whole(saying(model, text), model, **fields)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


async def test_max_tokens_may_reach_beyond_the_context(model):
    small = replace(model, max_model_len=64)
    source = FakeSource(lambda *_: model.tokenizer.encode("a") * 100)
    body = await whole(source, small, max_tokens=32_000)
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["output_tokens"] == 64 - body["usage"]["input_tokens"]


async def test_a_prompt_beyond_the_context_is_told_in_anthropics_words(model):
    """Coding agents look for these words, and then make the conversation shorter."""
    small = replace(model, max_model_len=16)
    answer = await post(saying(model, "x"), small, messages=[{"role": "user", "content": "a b c d " * 10}])
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 15 maximum")
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": "tex', {"a": "tex"}),
        ("[1]", {INVALID: "[1]"}),
        ("{oops}", {INVALID: "{oops}"}),
        ('{"a": 1e999}', {INVALID: '{"a": 1e999}'}),
    ],
)
def test_the_input_of_a_call_is_an_object_whatever_the_model_wrote(written, found):
    assert input_of(written) == found
    json.dumps(found)
