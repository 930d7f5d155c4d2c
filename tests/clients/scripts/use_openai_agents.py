"""openai-agents: agents on chat completions and on responses, without OpenAI's tracing."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MODEL, QUESTION, URL, run
from checks import weather as weather_in
from openai import AsyncOpenAI
from report import Report

set_tracing_disabled(True)
weather = function_tool(weather_in)


def models():
    """A model for each endpoint. Clients hold connections of one event loop, and each check has its own."""
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    return OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)


def agent(model, choice=None, **changes):
    parallel = False if "tools" in changes else None
    settings = ModelSettings(max_tokens=100, temperature=0.0, tool_choice=choice, parallel_tool_calls=parallel)
    return Agent("helper", instructions="Be brief.", model=model, model_settings=settings, **changes)


async def chat():
    for model in models():
        assert (await Runner.run(agent(model), QUESTION)).final_output


async def stream():
    for model in models():
        result = Runner.run_streamed(agent(model), QUESTION)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(pieces) == result.final_output


async def tools():
    """Each of two turns calls a function and ends there; the last answer has a form, and so comes to an end."""
    for model in models():
        history = []
        for choice in ("required", "weather"):  # any function, and this one
            caller = agent(model, choice, tools=[weather], tool_use_behavior="stop_on_first_tool")
            result = await Runner.run(caller, [*history, {"role": "user", "content": "How is the weather?"}])
            assert result.final_output.startswith("It is")
            history = result.to_input_list()
        final = await Runner.run(agent(model, output_type=Report), [*history, {"role": "user", "content": "Sum up."}])
        assert isinstance(final.final_output, Report)


async def tools_streamed():
    for model in models():
        caller = agent(model, "required", tools=[weather], tool_use_behavior="stop_on_first_tool")
        result = Runner.run_streamed(caller, QUESTION)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert names[:2] == ["tool_called", "tool_output"]
        assert result.final_output.startswith("It is")


async def loop():
    """The package's own loop: after the forced call it sets the choice to `auto`, and the model answers in words.

    Not on responses, where this package takes an answer that the token limit cuts for an error.
    """
    model, _ = models()
    result = await Runner.run(agent(model, "required", tools=[weather]), "How is the weather?", max_turns=4)
    kinds = [item.type for item in result.new_items]
    assert kinds.count("tool_call_item") == kinds.count("tool_call_output_item") >= 1
    assert kinds[-1] == "message_output_item"


async def structured():
    for model in models():
        result = await Runner.run(agent(model, output_type=Report), QUESTION)
        assert isinstance(result.final_output, Report)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, loop, structured)
