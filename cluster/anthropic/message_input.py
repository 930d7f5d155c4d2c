"""A call of the Messages API as the chat that it is. Chats have the one validator; its errors get our names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cluster.anthropic.message_blocks import ChatMessages, Origin, chat_of
from cluster.anthropic.message_fields import (
    EXTRAS,
    REFUSED_COUNT,
    REFUSED_MESSAGES,
    CountTokensFields,
    MessagesFields,
)
from cluster.openai.body import checked_fields
from cluster.openai.call import Call, prompt_ids, template_reads
from cluster.openai.fields import Hints
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import MAX_PRIORITY, parse_chat, refuse_other_models
from engine.errors import InvalidRequestError, PromptTooLongError
from engine.text.tokenizer import Tokenizer

_MODES = {"auto": "auto", "any": "required", "none": "none"}
_SWITCHES = ("enable_thinking", "thinking")  # of chat templates
_OURS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function(?:\.(?P<parameters>parameters))?")
# A conversation that some templates refuse: they have one message of the system, at the beginning.
_LATER_SYSTEM = [{"role": role, "content": "a"} for role in ("system", "user", "system", "user")]


@dataclass(frozen=True, slots=True)
class MessageCall:
    """An accepted call: what the client sent, and the chat that it comes to. origins: of the chat's messages."""

    fields: MessagesFields
    call: Call
    origins: Sequence[Origin]


def parse_messages(fields: Mapping[str, Any], model: ServedModel) -> MessageCall:
    """Check a call; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    extras = {name: fields[name] for name in EXTRAS if name in fields}
    own = {name: value for name, value in fields.items() if name not in extras}
    hints = Hints(model.strict_fields)
    checked = checked_fields(MessagesFields, own, REFUSED_MESSAGES, hints)
    sampling = {
        "max_completion_tokens": checked.max_tokens,
        "stream": checked.stream,
        "temperature": checked.temperature,
        "top_p": checked.top_p,
        "top_k": checked.top_k,
        "stop": None if checked.stop_sequences is None else list(checked.stop_sequences),
        "user": checked.metadata.user_id if checked.metadata else None,
        **extras,
    }
    call, chat = _parsed(checked, sampling, model, hints)
    call = replace(call, request_id=f"msg_{secrets.token_hex(16)}", fits_output=True)
    return MessageCall(checked, call, chat.origins)


def count_tokens(fields: Mapping[str, Any], model: ServedModel, hints: Hints) -> dict[str, int]:
    """Return how many tokens a prompt has; raises `ApiError` or `InvalidRequestError` naming the field."""
    checked = checked_fields(CountTokensFields, fields, REFUSED_COUNT, hints)
    call, chat = _parsed(checked, {}, model, hints)
    for name in call.ignored:
        hints.ignore(name)
    try:
        (ids,) = prompt_ids(call, model)
    except InvalidRequestError as error:
        raise renamed(error, chat.origins) from error
    return {"input_tokens": len(ids)}


def _parsed(
    checked: CountTokensFields, sampling: Mapping[str, Any], model: ServedModel, hints: Hints
) -> tuple[Call, ChatMessages]:
    refuse_other_models(checked.model, model)
    chat = chat_of(checked.messages, checked.system, hints, takes_later_system(model.tokenizer))
    fields = {
        "model": checked.model,
        "messages": chat.messages,
        "tools": None if checked.tools is None else [_tool(one) for one in checked.tools],
        **_tool_choice(checked),
        **_thinking(checked, model, hints),
        **_output(checked),
        **_prefill(chat, len(checked.messages)),
        **sampling,
    }
    try:
        call = parse_chat(fields, model)
    except InvalidRequestError as error:
        raise renamed(error, chat.origins) from error
    for name in call.ignored:
        hints.ignore(our_name(name))
    return replace(call, ignored=hints.names), chat


@lru_cache(maxsize=16)
def takes_later_system(tokenizer: Tokenizer) -> bool:
    """Whether the chat template takes messages of the system behind others, as agents send them for reminders."""
    try:
        tokenizer.render_chat(_LATER_SYSTEM)
    except InvalidRequestError:
        return False
    return True


def _tool(tool: Any) -> dict[str, Any]:
    told = tool.model_dump(exclude={"type", "input_schema"}, exclude_none=True)
    return {"type": "function", "function": {**told, "parameters": tool.input_schema}}


def _tool_choice(checked: CountTokensFields) -> dict[str, Any]:
    choice = checked.tool_choice
    if choice is None:
        return {}
    if choice.type in ("any", "tool") and not checked.tools:
        raise InvalidRequestError(f"tool_choice of type {choice.type!r} needs tools to choose from", "tool_choice")
    param = "tool_choice.name"
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError(f"{param} is missing: it names the tool", param, "missing_required_parameter")
    if choice.type != "tool" and choice.name is not None:
        raise InvalidRequestError(f"{param} is allowed only with type 'tool'", param)
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tool_choice": _MODES.get(choice.type, named), "parallel_tool_calls": parallel}


def _thinking(checked: CountTokensFields, model: ServedModel, hints: Hints) -> dict[str, Any]:
    """What turns thinking on or off in the model's template; where that reads nothing of it, it is a hint."""
    wanted = checked.thinking
    if wanted is None:
        return {}
    if wanted.budget_tokens is not None:
        param = "thinking.budget_tokens"
        if wanted.type != "enabled":
            raise InvalidRequestError(f"{param} is allowed only with type 'enabled'", param)
        if not 1 <= wanted.budget_tokens <= MAX_PRIORITY:
            message = f"{param} must be between 1 and {MAX_PRIORITY}, not {wanted.budget_tokens}"
            raise InvalidRequestError(message, param)
        if model.reasoning_parser is None:
            message = f"{param} needs a server with --reasoning-parser; leave it out"
            hints.leave(InvalidRequestError(message, param, "unsupported_parameter"))
    if wanted.type == "adaptive":
        return {}
    budget = {} if model.reasoning_parser is None else {"thinking_token_budget": wanted.budget_tokens}
    template = model.tokenizer.chat_template or ""
    read = [name for name in _SWITCHES if template_reads(template, name)]
    if not read:
        message = "thinking is not used by this model's chat template; leave it out"
        hints.leave(InvalidRequestError(message, "thinking", "unsupported_parameter"))
        return budget
    return {"chat_template_kwargs": dict.fromkeys(read, wanted.type == "enabled"), **budget}


def _output(checked: CountTokensFields) -> dict[str, Any]:
    wanted = checked.output_config
    if wanted is None:
        return {}
    found: dict[str, Any] = {"reasoning_effort": wanted.effort}
    if wanted.format is not None:
        named = {"name": "answer", "schema": wanted.format.schema_}
        found["response_format"] = {"type": "json_schema", "json_schema": named}
    return found


def _prefill(chat: ChatMessages, count: int) -> dict[str, Any]:
    """The model goes on with a last message of its own."""
    if not chat.ends_with_assistant:
        return {}
    if "tool_calls" in chat.messages[-1]:
        param = f"messages[{count - 1}]"
        raise InvalidRequestError(f"{param} calls a tool: a message of the user with its tool_result follows", param)
    return {"continue_final_message": True, "add_generation_prompt": False}


def too_long(error: InvalidRequestError, model: ServedModel) -> InvalidRequestError:
    """Return an error; that of a prompt that is too long in Anthropic's words, which agents look for."""
    if not isinstance(error, PromptTooLongError) or error.num_tokens is None:
        return error
    message = f"prompt is too long: {error.num_tokens} tokens > {model.longest_sequence - 1} maximum"
    return PromptTooLongError(message, "messages", error.num_tokens)


def renamed(error: InvalidRequestError, origins: Sequence[Origin] = ()) -> InvalidRequestError:
    """Return an error of the chat's validator by the names that this API has for its fields."""
    if error.param is None:
        return error
    return error.about(our_name(error.param, origins))


def our_name(param: str, origins: Sequence[Origin] = ()) -> str:
    """Return this API's name for a field of the chat's; origins: of the chat's messages."""
    found = _MESSAGE.match(param)
    if found and int(found[1]) < len(origins):
        return origins[int(found[1])].of(param[found.end() :])
    for theirs, ours in _OURS.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return ours + ("" if theirs == "chat_template_kwargs" else param[len(theirs) :])
    return _FUNCTION.sub(lambda one: one[1] + (".input_schema" if one["parameters"] else ""), param)
