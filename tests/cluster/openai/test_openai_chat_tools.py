"""Tools and thinking over HTTP: what the model is told, what clients get, whole and streamed."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.config_values import REASONING_PARSERS, TOOL_PARSERS
from cluster.openai.served_model import ServedModel
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, events, saying

TEMPLATE = (
    "{%- if tools %}{{ '<|system|>' + (tools | map(attribute='function.name') | join(',')) }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|user|>' + m.role + ':' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}{%- endfor -%}"
    "{%- if m.role == 'tool' %}{{ '@' + m.tool_call_id }}{%- endif -%}{%- endfor -%}"
    "{%- if reasoning_effort %}{{ 'effort=' + reasoning_effort }}{%- endif -%}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif -%}"
)
CHAT = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🚀"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder, TEMPLATE)))
    return ServedModel(
        MODEL,
        tokenizer,
        max_model_len=4096,
        vocab_size=tokenizer.vocab_size,
        created=1_700_000_000,
        tool_parser=TOOL_PARSERS.load("hermes"),
        reasoning_parser=REASONING_PARSERS.load("qwen3"),
    )


async def ask(source, model, **fields):
    async with client_for(app_for(source, model)) as client:
        body = {"model": MODEL, "messages": CHAT, "tools": TOOLS, **fields}
        return await client.post("/v1/chat/completions", json=body)


async def message(source, model, **fields):
    """The message and the finish_reason of an answer, streamed or not."""
    answer = await ask(source, model, **fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        choice = ChatCompletion.model_validate(answer.json(), strict=True).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    return joined(events(answer.text))


def joined(chunks):
    assert chunks.pop() == "[DONE]"
    whole, calls = {"role": "assistant"}, []
    for chunk in chunks:
        delta = ChatCompletionChunk.model_validate(chunk, strict=True).choices[0].delta.model_dump(exclude_none=True)
        for part in delta.pop("tool_calls", []):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": part["type"], "function": part["function"]})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                whole[name] = whole.get(name, "") + delta[name]
    if calls:
        whole["tool_calls"] = calls
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return whole, reasons[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_thinking_are_told_apart_from_content(model, stream):
    source = saying(model, f"<think>\nhm 🚀\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
    found, reason = await message(source, model, stream=stream)
    assert reason == "tool_calls"
    assert (found["content"], found["reasoning_content"]) == ("Let me see.", "hm 🚀")
    assert [json.loads(call["function"]["arguments"]) for call in found["tool_calls"]] == [{"city": "Köln 🚀"}] * 2
    assert len({call["id"] for call in found["tool_calls"]}) == 2
    assert {call["function"]["name"] for call in found["tool_calls"]} == {"weather"}


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_a_chunk_holds_one_piece_of_one_call(model, size):
    """Some clients read the first entry of a chunk's `tool_calls` and no other."""
    answer = await ask(saying(model, f"{CALL}\n{CALL}", chunk=size), model, stream=True)
    parts = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in events(answer.text)[:-1] if chunk["choices"]]
    parts = [part for part in parts if part]
    assert [len(part) for part in parts] == [1] * len(parts)
    assert len(parts) >= 2
    first = "".join(part[0]["function"]["arguments"] for part in parts if part[0]["index"] == 0)
    assert json.loads(first) == {"city": "Köln 🚀"}


async def test_usage_tells_what_was_thinking(model):
    for text, least in ((f"<think>hm hm</think>{CALL}", 3), ("no thinking", 0), ("<think>cut", 4)):
        usage = (await ask(saying(model, text), model)).json()["usage"]
        thought = text.partition("</think>")[0] if "<think>" in text else ""
        most = len(model.tokenizer.encode(thought)) + 1
        found = usage["completion_tokens_details"]["reasoning_tokens"]
        assert least <= found <= (most if thought else 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_is_enough_where_parallel_ones_are_not_wanted(model, stream):
    source = saying(model, f"{CALL}\n{CALL}")
    found, reason = await message(source, model, stream=stream, parallel_tool_calls=False)
    assert (len(found["tool_calls"]), reason) == (1, "tool_calls")
    assert source.ended == [(source.requests[0].request_id, 0)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_is_enforced_by_a_grammar(model, stream):
    source = saying(model, '[{"name": "weather", "parameters": {"city": "x"}}]')
    found, reason = await message(source, model, stream=stream, tool_choice="required")
    assert found["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert ("content" in found, reason) == (False, "tool_calls")
    assert source.requests[0].params.structured.kind == "json_schema"
    source = saying(model, '{"city": "y"}')
    named = {"type": "function", "function": {"name": "weather"}}
    found, _ = await message(source, model, stream=stream, tool_choice=named)
    assert found["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "y"}'}
    assert json.loads(source.requests[0].params.structured.text) == PARAMETERS


async def test_without_tools_or_with_none_text_is_text(model):
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        source = saying(model, CALL)
        found, reason = await message(source, model, **fields)
        assert (found["content"], reason) == (CALL, "stop")
        prompt = model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)
        assert "<|system|>" not in prompt


async def test_the_conversation_of_calls_reaches_the_template(model):
    source = saying(model, "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    await message(source, model, messages=messages, reasoning_effort="low")
    prompt = model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == (
        "<|system|>weather<|user|>user:weather?<|user|>assistant:" + 'weather{"city": "x"}'
        "<|user|>tool:sunny@c1effort=low<|assistant|>"
    )


async def test_an_answer_can_be_sent_back_as_it_came(model):
    first, _ = await message(saying(model, f"Well. {CALL}"), model)
    history = [*CHAT, first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sunny"}]
    found, _ = await message(saying(model, "It is sunny."), model, messages=history)
    assert found["content"] == "It is sunny."


BAD = [
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens"),
    ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "structured_outputs"),
    ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_what_does_not_go_with_tools_is_refused_by_name(model, fields, param):
    answer = await ask(saying(model, "x"), model, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
