"""Models and clients for tests of the Messages API, and what a stream adds up to."""

from __future__ import annotations

import json
from dataclasses import replace

from cluster.openai.parsers.tool_formats import HermesParser
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, served_model

# Reads tools, thinking, and messages of the system anywhere.
TEMPLATE = (
    "{%- if tools -%}{{- '[tools]' + tools | tojson -}}{%- endif -%}{%- for message in messages -%}"
    "{{- '<' + message['role'] + '>' -}}"
    "{%- if message.reasoning_content -%}{{- '(' + message.reasoning_content + ')' -}}{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}"
    "{%- if message.tool_call_id -%}{{- '@' + message.tool_call_id -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
    "{%- if reasoning_effort -%}{{- '[effort ' + reasoning_effort + ']' -}}{%- endif -%}"
)
# As Qwen's: the system speaks first or not at all.
SYSTEM_FIRST = (
    "{%- for message in messages -%}{%- if message['role'] == 'system' and not loop.first -%}"
    "{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}"
    "{{- '<' + message['role'] + '>' + message['content'] -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)
TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
USER = {"role": "user", "content": "hi"}
ASKED = {"model": MODEL, "max_tokens": 200, "messages": [USER]}


def model_with(folder, template=TEMPLATE, **changes):
    """A model whose chat template is `template`; it writes calls as Hermes does."""
    name = tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder / "tokenizer", template)
    model = served_model(folder / "model", max_model_len=4096)
    return replace(model, tokenizer=Tokenizer(str(name)), tool_parser=HermesParser, **changes)


async def post(source, model, *, path="/v1/messages", headers=None, **fields):
    """The answer to a message, or to another body for that route."""
    async with client_for(app_for(source, model)) as client:
        return await client.post(path, json=ASKED | fields, headers=headers)


async def whole(source, model, **fields):
    """The body of an answer that is well."""
    answer = await post(source, model, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(source, model, **fields):
    """The events of a stream."""
    answer = await post(source, model, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.text)


def events_of(text):
    """The events of the text of a stream, each named as its data says."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the last event is cut"
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events):
    """The message that the events of a stream add up to, as Anthropic's clients do it."""
    assert [one["type"] for one in events if one["type"].startswith("message_")] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return message


def prompt_of(source, model):
    """What the model was given to read."""
    return model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)
