"""pydantic-ai: agents whose functions and whose answers are typed."""

from contextlib import suppress

from checks import KEY, MODEL, QUESTION, URL, run, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import Report

SETTINGS = {"max_tokens": 100, "temperature": 0.0}


def agent(**changes):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, instructions="Be brief.", model_settings=SETTINGS, **changes)


async def chat():
    assert (await agent().run(QUESTION)).output


async def stream():
    whole = (await agent().run(QUESTION)).output
    async with agent().run_stream(QUESTION) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True)]
    assert "".join(pieces).strip() == whole.strip()


def first_calls(context):
    """Settings by step: the first must call, what follows is words. Set for a whole run, it could not end."""
    return SETTINGS | {"parallel_tool_calls": False, "tool_choice": "required" if context.run_step == 1 else "none"}


async def tools():
    helper, history = agent(tools=[weather]), None
    for _ in range(2):
        result = await helper.run("How is the weather?", message_history=history, model_settings=first_calls)
        history = result.all_messages()
        assert result.output
    parts = [part for message in history for part in message.parts]
    assert [part.part_kind for part in parts].count("tool-return") == 2


async def tools_streamed():
    """Both steps of the loop are streams: the forced call, and the words after it."""
    asked = {"model_settings": first_calls}
    async with agent(tools=[weather]).run_stream("How is the weather?", **asked) as streamed:
        assert [piece async for piece in streamed.stream_text(delta=True)]
    assert any(part.part_kind == "tool-return" for message in streamed.all_messages() for part in message.parts)
    async with agent(output_type=ToolOutput(Report)).run_stream(QUESTION) as streamed:
        assert isinstance(await streamed.get_output(), Report)


async def typed_loop():
    """Where the answer is a forced call, so is each step before it: the model chooses between the two functions."""
    helper = agent(output_type=ToolOutput(Report), tools=[weather])
    with suppress(UsageLimitExceeded):  # it may call the function to the end: it does not understand the question
        assert isinstance((await helper.run(QUESTION, usage_limits=UsageLimits(request_limit=4))).output, Report)


async def structured():
    for form in (NativeOutput(Report), ToolOutput(Report)):  # a JSON schema, and a forced call
        assert isinstance((await agent(output_type=form).run(QUESTION)).output, Report)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, typed_loop, structured)
