"""The openai package: chat, streams, tools over several turns, structured output, responses."""

import json

from checks import DEGREES, KEY, MODEL, QUESTION, URL, run, weather
from openai import OpenAI
from report import Report

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
USER = {"role": "user", "content": QUESTION}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(DEGREES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=[USER], temperature=0, max_tokens=40)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 40
    assert answer.model == MODEL


def stream():
    asked = {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens <= 40


def tools():
    messages = [{"role": "user", "content": "How is the weather in two cities?"}]
    asked = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 100}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        message = answer.choices[0].message
        assert not message.content
        messages.append(message)  # as it came
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(city)})
    assert len(messages) == 5
    final = client.chat.completions.create(**asked, tool_choice="none").choices[0].message
    assert final.content
    assert not final.tool_calls


def tools_streamed():
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 100, **forced}
    with client.chat.completions.stream(**asked) as events:
        kinds = {event.type for event in events}
        message = events.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert all(call.function.parsed_arguments["city"] in DEGREES for call in message.tool_calls)


def structured():
    asked = {"model": MODEL, "messages": [USER], "response_format": Report, "max_tokens": 120}
    answer = client.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, Report)
    with client.chat.completions.stream(**asked) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Report)


def responses():
    asked = {"model": MODEL, "store": False, "max_output_tokens": 120}
    answer = client.responses.create(**asked, instructions="Be brief.", input=QUESTION)
    assert answer.output_text
    parsed = client.responses.parse(**asked, input=QUESTION, text_format=Report)
    assert isinstance(parsed.output_parsed, Report)
    flat = {"type": "function", **TOOL["function"]}
    history = [USER]
    forced = {"tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.responses.create(**asked, input=history, **forced)
    history += called.output
    for call in called.output:
        result = weather(json.loads(call.arguments)["city"])
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    with client.responses.stream(**asked, input=history, tools=[flat], tool_choice="none") as events:
        first, *_, last = events
    # Not get_final_response(): it raises where the token limit cut the answer, whose last event is another.
    assert first.type == "response.created"
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, structured, responses)
