"""A checked chat as the model's template takes it.

What the template does not read is refused where it is part of what was said, and a hint where it is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cluster.openai.hints import Hints
from cluster.openai.messages import Message
from cluster.openai.schema import ChatFields, TokenizeFields
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError

_MESSAGE_LOOP = re.compile(r"\bfor\s+(\w+)\s+in\s+\w*messages\b")
ChatPrompt = ChatFields | TokenizeFields  # the fields that make a prompt out of messages


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat and how its template is to be filled in."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: Mapping[str, Any] | None = None


def conversation_of(checked: ChatPrompt, model: ServedModel, hints: Hints) -> Conversation:
    """Return the conversation; raises `InvalidRequestError` naming what the model's template does not read.

    hints: notes what it may do without.
    """
    if not checked.messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    if checked.continue_final_message and checked.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt must be false with continue_final_message=true", "add_generation_prompt"
        )
    template = model.tokenizer.chat_template or ""
    messages = [_message(message, f"messages[{i}]", template, hints) for i, message in enumerate(checked.messages)]
    add = not checked.continue_final_message and checked.add_generation_prompt is not False
    return Conversation(tuple(messages), add, checked.continue_final_message, _options(checked, template, hints))


def _options(checked: ChatPrompt, template: str, hints: Hints) -> dict[str, Any]:
    """Variables of the template beside the messages."""
    kwargs = checked.chat_template_kwargs
    given = kwargs.model_dump(exclude_none=True) if kwargs else {}
    options = {
        name: value
        for name, value in given.items()
        if _is_used(name, f"chat_template_kwargs.{name}", template, hints)
    }
    effort = checked.reasoning_effort
    if effort is not None and _is_used("reasoning_effort", "reasoning_effort", template, hints):
        options["reasoning_effort"] = effort
    if checked.tools and checked.tool_choice != "none":
        _refuse_unread("tools", "tools", template)
        options["tools"] = [tool.for_template() for tool in checked.tools]
    return options


def _message(message: Message, param: str, template: str, hints: Hints) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    one: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None and _is_used(_names_read(template), f"{param}.name", template, hints):
        one["name"] = message.name
    one |= _thoughts(message, param, template, hints)
    if message.tool_calls is not None:
        _only_from("assistant", "tool_calls", message, param)
        _refuse_unread("tool_calls", f"{param}.tool_calls", template)
        one["tool_calls"] = [call.for_template() for call in message.tool_calls]
    if message.role == "tool" or message.tool_call_id is not None:
        one["tool_call_id"] = _tool_call_id(message, param, template)
    return one


def _thoughts(message: Message, param: str, template: str, hints: Hints) -> dict[str, str]:
    """What the assistant thought, by either name; where both say something, the older counts."""
    found: dict[str, str] = {}
    for name, text in (("reasoning_content", message.reasoning_content), ("reasoning", message.reasoning)):
        if text is None:
            continue
        _only_from("assistant", name, message, param)
        if not _is_used("reasoning_content", f"{param}.{name}", template, hints):
            continue
        if found.setdefault("reasoning_content", text) != text:
            other = f"{param}.{name}"
            hints.leave(InvalidRequestError(f"{other} is not what reasoning_content says; send one of them", other))
    return found


def _tool_call_id(message: Message, param: str, template: str) -> str:
    _only_from("tool", "tool_call_id", message, param)
    _refuse_unread("tool|tool_call_id|ipython", f"{param}.role", template)
    if message.tool_call_id is None:
        name = f"{param}.tool_call_id"
        raise InvalidRequestError(
            f"{name} is missing: it names the call that this answers", name, "missing_parameter"
        )
    return message.tool_call_id


def _only_from(role: str, field: str, message: Message, param: str) -> None:
    if message.role != role:
        name = f"{param}.{field}"
        raise InvalidRequestError(f"{name} is allowed only in messages with role {role!r}", name)


@lru_cache(maxsize=16)
def _names_read(template: str) -> str:
    """The pattern of a message's name as the template would read it: tools and their calls have names too."""
    variables = "|".join({"message", *_MESSAGE_LOOP.findall(template)})
    return rf"""(?:{variables})(?:\.name|\.get\(\s*["']name|\[\s*["']name)"""


def _is_used(variable: str, param: str, template: str, hints: Hints) -> bool:
    """Whether the template reads `variable`; where not, the field is a hint."""
    if _reads(template, variable):
        return True
    hints.leave(_unread(param))
    return False


def _refuse_unread(variable: str, param: str, template: str) -> None:
    if not _reads(template, variable):
        raise _unread(param)


def _unread(param: str) -> InvalidRequestError:
    message = f"{param} is not used by this model's chat template; leave it out"
    return InvalidRequestError(message, param, "unsupported_parameter")


@lru_cache(maxsize=256)  # asked for each of thousands of messages
def _reads(template: str, variable: str) -> bool:
    return re.search(rf"\b(?:{variable})\b", template) is not None
