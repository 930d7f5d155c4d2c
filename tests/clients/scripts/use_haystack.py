"""haystack: chat generators on chat completions and on responses, tools, an agent, and a pipeline around one."""

import json
import os

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

from checks import KEY, MODEL, QUESTION, URL, run, weather
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from report import Report

WHERE = {"model": MODEL, "api_base_url": URL, "api_key": Secret.from_token(KEY), "max_retries": 0}
ASKED = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(QUESTION)]
TOOL = create_tool_from_function(weather)
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}


def chat_model(**settings):
    return OpenAIChatGenerator(**WHERE, generation_kwargs={"max_tokens": 100, "temperature": 0} | settings)


def responses_model(**settings):
    kwargs = {"max_output_tokens": 100, "temperature": 0, "store": False} | settings
    return OpenAIResponsesChatGenerator(**WHERE, generation_kwargs=kwargs)


def chat():
    for model in (chat_model(), responses_model()):
        (reply,) = model.run(ASKED)["replies"]
        assert reply.text
    (reply,) = chat_model().run(ASKED)["replies"]
    assert reply.meta["usage"]["completion_tokens"] <= 100


def stream():
    for model in (chat_model(), responses_model()):
        whole = model.run(ASKED)["replies"][0].text
        pieces = []
        (reply,) = model.run(ASKED, streaming_callback=lambda chunk, kept=pieces: kept.append(chunk.content))[
            "replies"
        ]
        assert "".join(pieces) == reply.text == whole


def tools():
    model, messages = chat_model(), [ChatMessage.from_user("How is the weather in two cities?")]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        asked = {"tool_choice": choice, "parallel_tool_calls": False}
        (reply,) = model.run(messages, tools=[TOOL], tools_strict=True, generation_kwargs=asked)["replies"]
        messages.append(reply)
        for call in reply.tool_calls:
            messages.append(ChatMessage.from_tool(TOOL.invoke(**call.arguments), origin=call))
    (final,) = model.run(messages, tools=[TOOL], generation_kwargs={"tool_choice": "none"})["replies"]
    assert final.text
    assert sum(message.tool_call_result is not None for message in messages) == 2


def tools_streamed():
    for model in (chat_model(**FORCED), responses_model(**FORCED)):
        (reply,) = model.run(ASKED, tools=[TOOL], streaming_callback=lambda _: None)["replies"]
        (call,) = reply.tool_calls
        assert TOOL.invoke(**call.arguments).startswith("It is")


def agent():
    """Its own loop calls the function that is forced, and ends there."""
    helper = Agent(chat_generator=chat_model(**FORCED), tools=[TOOL], exit_conditions=["weather"])
    messages = helper.run(messages=[ChatMessage.from_user("How is the weather?")])["messages"]
    assert messages[-1].tool_call_result.result.startswith("It is")


def pipeline():
    flow = Pipeline()
    flow.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What does {{ name }} do?")]))
    flow.add_component("model", chat_model())
    flow.connect("prompt.prompt", "model.messages")
    assert flow.run({"prompt": {"name": "os.path.join"}})["model"]["replies"][0].text


def structured():
    (reply,) = chat_model(response_format=Report).run(ASKED)["replies"]
    assert Report.model_validate_json(reply.text)
    (reply,) = responses_model(text_format=Report).run(ASKED)["replies"]
    assert Report.model_validate(json.loads(reply.text))


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, agent, pipeline, structured)
