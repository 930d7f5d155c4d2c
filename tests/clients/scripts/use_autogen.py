"""autogen: `OpenAIChatCompletionClient` by itself, and an `AssistantAgent` around it."""

import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import KEY, MODEL, QUESTION, URL, run, weather
from report import Report

# What a server that is not OpenAI's can do is told by `model_info`.
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}
TOOL = FunctionTool(weather, description="Tell the weather in a city.", name="weather", strict=True)
ASKED = [SystemMessage(content="Be brief."), UserMessage(content=QUESTION, source="user")]


def client(**changes):
    asked = {"max_tokens": 100, "temperature": 0.0, "parallel_tool_calls": False, "max_retries": 0} | changes
    return OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=INFO, **asked)


async def chat():
    result = await client().create(ASKED)
    assert result.content
    assert result.usage.completion_tokens <= 100


async def stream():
    whole = (await client().create(ASKED)).content
    *pieces, last = [piece async for piece in client().create_stream(ASKED)]
    assert isinstance(last, CreateResult)
    assert "".join(pieces) == last.content == whole


async def tools():
    llm = client()
    messages = [UserMessage(content="How is the weather in two cities?", source="user")]
    for choice in ("required", TOOL):
        result = await llm.create(messages, tools=[TOOL], tool_choice=choice)
        messages.append(AssistantMessage(content=result.content, source="assistant"))
        said = [
            FunctionExecutionResult(
                call_id=call.id,
                name=call.name,
                is_error=False,
                content=await TOOL.run_json(json.loads(call.arguments), CancellationToken()),
            )
            for call in result.content
        ]
        messages.append(FunctionExecutionResultMessage(content=said))
    final = await llm.create(messages, tools=[TOOL], tool_choice="none")
    assert isinstance(final.content, str)


async def tools_streamed():
    *_, last = [piece async for piece in client().create_stream(ASKED, tools=[TOOL], tool_choice="required")]
    (call,) = last.content
    assert (await TOOL.run_json(json.loads(call.arguments), CancellationToken())).startswith("It is")
    assert last.finish_reason == "function_calls"


async def agent():
    """The agent's own tools are `auto`, so the model answers in words; both of its turns are in one conversation."""
    assistant = AssistantAgent("assistant", model_client=client(), tools=[TOOL])
    for _ in range(2):
        result = await assistant.run(task=QUESTION)
        assert result.messages[-1].content


async def structured():
    result = await client().create(ASKED, json_output=Report)
    assert Report.model_validate_json(result.content)
    assistant = AssistantAgent("assistant", model_client=client(), output_content_type=Report)
    assert isinstance((await assistant.run(task=QUESTION)).messages[-1].content, Report)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, agent, structured)
