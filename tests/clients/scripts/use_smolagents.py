"""smolagents: `OpenAIModel` by itself, and its agent that calls functions until one of them gives the answer."""

import io
import json
from typing import ClassVar

from checks import DEGREES, KEY, MODEL, QUESTION, URL, City, run
from checks import weather as weather_in
from report import Report
from rich.console import Console
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole, agglomerate_stream_deltas
from smolagents.monitoring import AgentLogger, LogLevel

ASKED = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


class Weather(Tool):
    """A function with a choice of cities: one that `@tool` makes of a Python function has only types."""

    name = "weather"
    description = "Tell the weather in a city."
    inputs: ClassVar = {"city": {"type": "string", "description": "The city.", "enum": list(DEGREES)}}
    output_type = "string"

    def forward(self, city: City) -> str:
        """Run it."""
        return weather_in(city)


class FinalAnswer(Tool):
    """In the place of smolagents' own, whose answer may have any length."""

    name = "final_answer"
    description = "Give the final answer."
    inputs: ClassVar = {"answer": {"type": "string", "description": "The answer.", "enum": ["warm", "cold"]}}
    output_type = "string"

    def forward(self, answer: str) -> str:
        """Run it."""
        return answer


def model(**settings):
    return OpenAIModel(MODEL, URL, KEY, client_kwargs={"max_retries": 0}, max_tokens=100, temperature=0, **settings)


def chat():
    answer = model()(ASKED)
    assert answer.content
    assert answer.token_usage.output_tokens <= 100


def stream():
    whole = model()(ASKED).content
    deltas = list(model().generate_stream(ASKED))
    assert agglomerate_stream_deltas(deltas).content == whole
    assert deltas[-1].token_usage.output_tokens <= 100


def tools():
    one, tool = model(parallel_tool_calls=False), Weather()
    messages = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "How is the weather?"}])]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (call,) = one(messages, tools_to_call_from=[tool], tool_choice=choice).tool_calls
        said = tool(**json.loads(call.function.arguments))
        # smolagents tells of calls and of what they gave in words.
        for role, text in ((MessageRole.TOOL_CALL, f"Calling tools: {call}"), (MessageRole.TOOL_RESPONSE, said)):
            messages.append(ChatMessage(role=role, content=[{"type": "text", "text": text}]))
    final = one(messages, tools_to_call_from=[tool], tool_choice="none")
    assert final.content
    assert not final.tool_calls


def tools_streamed():
    deltas = model(parallel_tool_calls=False).generate_stream(ASKED, tools_to_call_from=[Weather()])
    (call,) = agglomerate_stream_deltas(list(deltas)).tool_calls
    assert call.function.name == "weather"


def agent():
    """Its own loop and its own long prompt: each step must call a function.

    A small model may never choose the last one: after the last step it is asked for an answer in words.
    """
    for streams in (False, True):
        helper = ToolCallingAgent(
            [Weather(), FinalAnswer()],
            model(parallel_tool_calls=False),
            stream_outputs=streams,
            max_steps=3,
            logger=AgentLogger(LogLevel.OFF, Console(file=io.StringIO())),  # else it draws on our output
        )
        result = helper.run("How is the weather in Paris?", return_full_result=True)
        steps = [step for step in result.steps if step.get("tool_calls")]
        assert steps
        assert all(step["observations"] and not step["error"] for step in steps)
        assert result.output


def structured():
    schema = {"name": "report", "schema": Report.model_json_schema(), "strict": True}
    answer = model()(ASKED, response_format={"type": "json_schema", "json_schema": schema})
    assert Report.model_validate_json(answer.content)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, agent, structured)
