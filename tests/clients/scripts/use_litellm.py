"""litellm: any OpenAI-compatible server is the provider `openai/` with an `api_base`."""

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks GitHub for a list of prices

import litellm
from checks import DEGREES, KEY, MODEL, QUESTION, URL, run, too_long_prompt, weather
from report import Report

USER = {"role": "user", "content": QUESTION}
ASKED = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "max_retries": 0, "max_tokens": 100}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(DEGREES)}},
            "required": ["city"],
        },
    },
}


def chat():
    answer = litellm.completion(**ASKED, messages=[USER], temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 100


def stream():
    whole = litellm.completion(**ASKED, messages=[USER], temperature=0).choices[0].message.content
    chunks = litellm.completion(**ASKED, messages=[USER], temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def tools():
    messages = [{"role": "user", "content": "How is the weather in two cities?"}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        one_call = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        message = litellm.completion(**ASKED, messages=messages, **one_call).choices[0].message
        messages.append(message)  # as it came
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(city)})
    chunks = litellm.completion(**ASKED, messages=messages, tools=[TOOL], tool_choice="none", stream=True)
    assert litellm.stream_chunk_builder(list(chunks)).choices[0].message.content
    assert [message["role"] for message in messages].count("tool") == 2


def tools_streamed():
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = litellm.completion(**ASKED, messages=[USER], **forced, stream=True)
    choice = litellm.stream_chunk_builder(list(chunks)).choices[0]
    (call,) = choice.message.tool_calls
    assert weather(**json.loads(call.function.arguments)).startswith("It is")
    assert choice.finish_reason == "tool_calls"


def structured():
    answer = litellm.completion(**ASKED, messages=[USER], response_format=Report)
    assert Report.model_validate_json(answer.choices[0].message.content)


def too_long():
    """What does not fit is told by litellm's own exception, which its fallbacks stand on."""
    try:
        litellm.completion(**ASKED, messages=[{"role": "user", "content": too_long_prompt()}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, structured, too_long)
