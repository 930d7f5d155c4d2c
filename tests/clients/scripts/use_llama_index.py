"""llama-index: `OpenAILike` is its class for servers that speak OpenAI's protocol."""

from checks import KEY, MODEL, QUESTION, URL, run, weather
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from report import Report

llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=100,
    max_retries=0,
    temperature=0.0,
)
TOOL = FunctionTool.from_defaults(weather)


def chat():
    answer = llm.chat([ChatMessage(role=MessageRole.SYSTEM, content="Be brief."), ChatMessage(QUESTION)])
    assert answer.message.content


def stream():
    whole = llm.chat([ChatMessage(QUESTION)]).message.content
    chunks = list(llm.stream_chat([ChatMessage(QUESTION)]))
    assert "".join(chunk.delta or "" for chunk in chunks) == whole


def tools():
    messages = [ChatMessage("How is the weather in two cities?")]
    for choice in ("required", "weather"):  # any function, and this one
        answer = llm.chat_with_tools([TOOL], chat_history=messages, tool_choice=choice)
        messages.append(answer.message)
        for call in llm.get_tool_calls_from_response(answer):
            said = TOOL.call(**call.tool_kwargs).content
            told = {"tool_call_id": call.tool_id}
            messages.append(ChatMessage(role=MessageRole.TOOL, content=said, additional_kwargs=told))
    final = llm.chat_with_tools([TOOL], chat_history=messages, tool_choice="none")
    assert final.message.content
    assert sum(message.role == MessageRole.TOOL for message in messages) == 2


def tools_streamed():
    asked = [ChatMessage(QUESTION)]
    *_, last = llm.stream_chat_with_tools([TOOL], chat_history=asked, tool_choice="required")
    (call,) = llm.get_tool_calls_from_response(last)
    assert TOOL.call(**call.tool_kwargs).content.startswith("It is")


def structured():
    found = llm.as_structured_llm(Report).chat([ChatMessage(QUESTION)]).raw
    assert isinstance(found, Report)


if __name__ == "__main__":
    run(chat, stream, tools, tools_streamed, structured)
