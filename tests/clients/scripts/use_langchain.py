"""langchain: a chat model of langchain-openai, its tools and its structured output, and an agent around it."""

from checks import KEY, MODEL, QUESTION, URL, City, run
from checks import weather as weather_in
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from report import Report

# A stream has usage where it is asked for: of a server that is not OpenAI's, langchain does not by itself.
SETTINGS = {"max_retries": 0, "max_tokens": 100, "temperature": 0, "stream_usage": True}
llm = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, **SETTINGS)


@tool
def weather(city: City) -> str:
    """Tell the weather in a city."""
    return weather_in(city)


def chat():
    answer = llm.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 100


def stream():
    whole = llm.invoke(QUESTION).content
    assert "".join(chunk.content for chunk in llm.stream(QUESTION)) == whole


def tools():
    messages = [HumanMessage("How is the weather in two cities?")]
    for choice in ("any", "weather"):  # any function, and this one
        answer = llm.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke(messages)
        messages.append(answer)
        messages += [weather.invoke(call) for call in answer.tool_calls]
    final = llm.bind_tools([weather], tool_choice="none").invoke(messages)
    assert final.content
    assert not final.tool_calls
    assert sum(isinstance(message, ToolMessage) for message in messages) == 2


def tools_streamed():
    forced = llm.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    first, *others = forced.stream(QUESTION)
    for chunk in others:
        first += chunk
    (call,) = first.tool_calls
    assert weather.invoke(call).content.startswith("It is")
    assert first.usage_metadata["output_tokens"] <= 100


def agent():
    """The loop of langchain itself. Its tools are `auto`: the answer is a call, or has the form that is asked for."""
    made = create_agent(llm, [weather], response_format=Report, middleware=[ModelCallLimitMiddleware(run_limit=3)])
    assert made.invoke({"messages": [HumanMessage(QUESTION)]})["structured_response"]


def structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Report, method=method).invoke(QUESTION), Report)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, agent, structured)
