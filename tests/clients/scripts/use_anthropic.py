"""The anthropic package: messages, streams, tools over several turns, structured output, counted tokens."""

import json

import anthropic
from checks import DEGREES, KEY, MODEL, QUESTION, URL, City, run, too_long_prompt, weather
from pydantic import BaseModel

# This package adds /v1 itself.
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
GREEDY = {"temperature": 0}  # this package has no argument for it any more
USER = {"role": "user", "content": QUESTION}
TOOL = {
    "name": "weather",
    "description": "Tell the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(DEGREES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Forecast(BaseModel):
    """The weather in a city. This package takes bounds of lists and numbers out of schemas."""

    city: City
    warm: bool


def chat():
    answer = client.messages.create(model=MODEL, messages=[USER], max_tokens=40, extra_body=GREEDY)
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 40
    assert (answer.model, answer.role) == (MODEL, "assistant")
    assert answer._request_id


def stream():
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 40, "system": "Be brief.", "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert text == whole.content[0].text == message.content[0].text
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.stop_reason == whole.stop_reason


def tools():
    messages = [{"role": "user", "content": "How is the weather in two cities?"}]
    asked = {"model": MODEL, "tools": [TOOL], "max_tokens": 100}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(**asked, messages=messages, tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        messages.append({"role": "assistant", "content": answer.content})  # as it came
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": weather(call.input["city"])} for call in calls
        ]
        messages.append({"role": "user", "content": results})
    final = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    assert final.content[0].type == "text"


def tools_streamed():
    forced = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client.messages.stream(model=MODEL, messages=[USER], max_tokens=100, **forced) as events:
        kinds = {event.type for event in events}
        (call,) = events.get_final_message().content
    assert "input_json" in kinds
    assert call.input["city"] in DEGREES


def structured():
    answer = client.messages.parse(model=MODEL, messages=[USER], output_format=Forecast, max_tokens=120)
    assert isinstance(answer.parsed_output, Forecast)


def tokens_counted():
    asked = {"model": MODEL, "messages": [USER], "system": "Be brief."}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def errors():
    try:
        client.messages.create(model="nobody", messages=[USER], max_tokens=1)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("a model that is not there was served")
    try:
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": too_long_prompt()}], max_tokens=1)
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in json.dumps(error.body)
    else:
        raise AssertionError("a prompt beyond the context was served")


def models():
    assert MODEL in [one.id for one in client.models.list()]
    assert client.models.retrieve(MODEL).max_input_tokens > 0


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, structured, tokens_counted, errors, models)
