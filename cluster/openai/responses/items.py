"""The items of `input` as the messages of a chat, and where in the input each message came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.openai.messages import MAX_MESSAGES
from engine.errors import InvalidRequestError

_TEXTS = frozenset({"input_text", "output_text", "text"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_LABELS = frozenset({"id", "status", "type"})  # of items that were outputs once; they say nothing to the model


class Messages:
    """Collects the messages. origins: for each message, the name of what it was made from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []

    def add(self, origin: str, message: dict[str, Any]) -> None:
        """Append a message."""
        self.messages.append(message)
        self.origins.append(origin)

    def add_call(self, origin: str, call: dict[str, Any]) -> None:
        """Add a call to the assistant's turn: chats have all calls of one turn in one message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            self.add(origin, {"role": "assistant", "content": None})
        self.messages[-1].setdefault("tool_calls", []).append(call)


def messages_of(given: str | Sequence[Any], instructions: str | None) -> Messages:
    """Return the chat; raises `InvalidRequestError` naming the item that is none of a text chat.

    Reasoning items are taken and left out, as chat templates leave out what was thought in earlier turns.
    """
    found = Messages()
    if instructions is not None:
        found.add("instructions", {"role": "system", "content": instructions})
    if isinstance(given, str):
        found.add("input", {"role": "user", "content": given})
        return found
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidRequestError(f"input must hold 1 to {MAX_MESSAGES} items, not {len(given)}", "input")
    for i, item in enumerate(given):
        _add_item(f"input[{i}]", item, found)
    return found


def _add_item(origin: str, item: Any, found: Messages) -> None:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"{origin} must be an object", origin, "invalid_type")
    kind = item.get("type", "message")
    if kind == "message":
        found.add(origin, _message(origin, item))
    elif kind == "function_call":
        found.add_call(origin, _call(origin, item))
    elif kind == "function_call_output":
        found.add(origin, _output(origin, item))
    elif kind != "reasoning":
        known = "message, function_call, function_call_output and reasoning"
        raise InvalidRequestError(
            f"{origin}.type must be one of {known}, not {str(kind)[:100]!r}", f"{origin}.type", "unsupported_value"
        )


def _message(origin: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(origin, item, {"role", "content", "phase"})
    role = _string(origin, item, "role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{origin}.role must be one of {', '.join(sorted(_ROLES))}", f"{origin}.role")
    return {"role": role, "content": _text(f"{origin}.content", item.get("content"))}


def _call(origin: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(origin, item, {"call_id", "name", "arguments"})
    function = {"name": _string(origin, item, "name"), "arguments": _string(origin, item, "arguments")}
    return {"id": _string(origin, item, "call_id"), "type": "function", "function": function}


def _output(origin: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(origin, item, {"call_id", "output"})
    text = _text(f"{origin}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": _string(origin, item, "call_id"), "content": text}


def _text(param: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{param} must be a string or a list of text parts", param, "invalid_type")
    return [_part(f"{param}[{i}]", part) for i, part in enumerate(content)]


def _part(param: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS or not isinstance(part.get("text"), str):
        raise InvalidRequestError(
            f"{param} must be a part of type 'input_text' or 'output_text': this model reads no other input", param
        )
    _refuse_others(param, part, {"text", "annotations", "logprobs"})  # the last two come with parts that were outputs
    return {"type": "text", "text": part["text"]}


def _string(origin: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if isinstance(value, str):
        return value
    param = f"{origin}.{name}"
    if value is None:
        raise InvalidRequestError(f"{param} is missing", param, "missing_parameter")
    raise InvalidRequestError(f"{param} must be a string", param, "invalid_type")


def _refuse_others(origin: str, item: Mapping[str, Any], known: set[str]) -> None:
    for name, value in item.items():
        if name not in known and name not in _LABELS and value is not None:
            param = f"{origin}.{name[:100]}"
            raise InvalidRequestError(f"{param} is not supported; leave it out", param, "unknown_parameter")
