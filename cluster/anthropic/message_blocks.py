"""Messages of Anthropic's API as those of a chat, each with the place that it came from.

A user's turn there holds results of tools and text; a chat has a message for each result. Turns of one role that
follow each other are one turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.openai.fields import Hints
from engine.errors import InvalidRequestError

# A text that names a request of an agent, for the bill: it would make each prompt begin differently.
BILLING = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")
# What says nothing to the model: of caches, of what the answer was made from, of who called a tool.
_HINTS = frozenset({"cache_control", "citations", "caller", "signature", "toolset_name"})
_CALL = re.compile(r"\.tool_calls\[(\d+)\](.*)", re.DOTALL)
_CALL_NAMES = {".id": ".id", ".function.name": ".name", ".function.arguments": ".input"}
Block = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a message of the chat was made from. calls: paths of the blocks of its calls."""

    path: str
    calls: list[str] = field(default_factory=list)

    def of(self, part: str) -> str:
        """Return the path of a part of the message, such as ".content" or ".tool_calls[0].function.name"."""
        if found := _CALL.fullmatch(part):
            number = int(found[1])
            return (self.calls[number] if number < len(self.calls) else self.path) + _CALL_NAMES.get(found[2], "")
        if part == ".tool_calls" and self.calls:
            return self.calls[0]
        return self.path


class ChatMessages:
    """Collects the messages of a chat.

    origins: of each. later_system: whether the template takes messages of the system behind others; where not, they
    are joined to the first one. hints: notes what has no use.
    """

    def __init__(self, hints: Hints, later_system: bool) -> None:
        self.hints = hints
        self.messages: list[dict[str, Any]] = []
        self.origins: list[Origin] = []
        self._later_system = later_system

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the model is to go on with its own last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def add_system(self, path: str, texts: Sequence[str]) -> None:
        """Add what the system says."""
        if not texts:
            return
        if self.messages and not self._later_system:
            if self.messages[0]["role"] != "system":
                self.messages.insert(0, {"role": "system", "content": []})
                self.origins.insert(0, Origin(path))
            self.messages[0]["content"] += map(_part, texts)
            return
        self._turn("system", path)["content"] += map(_part, texts)

    def add_text(self, role: str, path: str, text: str) -> None:
        """Add text to the turn of a role."""
        self._turn(role, path)["content"].append(_part(text))

    def add_thinking(self, path: str, text: str) -> None:
        """Add what the assistant thought."""
        self._turn("assistant", path).setdefault("reasoning_content", []).append(text)

    def add_call(self, path: str, call: dict[str, Any]) -> None:
        """Add a call to the turn of the assistant."""
        self._turn("assistant", path).setdefault("tool_calls", []).append(call)
        self.origins[-1].calls.append(path)

    def add_result(self, path: str, tool_use_id: str, texts: Sequence[str]) -> None:
        """Add what a tool returned."""
        self.messages.append({"role": "tool", "tool_call_id": tool_use_id, "content": "\n".join(texts)})
        self.origins.append(Origin(path))

    def _turn(self, role: str, path: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
            self.origins.append(Origin(path))
        return self.messages[-1]


def chat_of(messages: Sequence[Any], system: Any, hints: Hints, later_system: bool) -> ChatMessages:
    """Return the chat; raises `InvalidRequestError` naming the block that is none of a text chat."""
    found = ChatMessages(hints, later_system)
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    if system is not None:
        found.add_system("system", _texts("system", system, hints))
    for i, message in enumerate(messages):
        _add(f"messages[{i}]", message, found)
    for message in found.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return found


def _add(path: str, message: Any, found: ChatMessages) -> None:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object", path, "invalid_type")
    _refuse_others(path, message, {"role", "content"}, found.hints)
    role, content = _string(path, message, "role"), message.get("content")
    if role not in _ROLES:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(_ROLES)}", f"{path}.role")
    inside = f"{path}.content"
    if role == "system":
        found.add_system(inside, _texts(inside, content, found.hints))
    elif isinstance(content, str):
        found.add_text(role, inside, content)
    elif isinstance(content, list):
        if not content:
            _add_nothing(role, inside, found)
        for i, block in enumerate(content):
            _add_block(role, f"{inside}[{i}]", block, found)
    else:
        raise InvalidRequestError(f"{inside} must be a string or a list of blocks", inside, "invalid_type")


def _add_nothing(role: str, path: str, found: ChatMessages) -> None:
    """The assistant may have said nothing: Anthropic's server returns such messages, and clients send them back."""
    if role != "assistant":
        raise InvalidRequestError(f"{path} must hold at least one block", path)
    found.add_text(role, path, "")


def _add_block(role: str, path: str, block: Any, found: ChatMessages) -> None:
    kinds = _BLOCKS[role]
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        raise InvalidRequestError(
            f"{path}.type must be one of {known} in a message of the {role}, not {str(kind)[:100]!r}: "
            "this model reads text only, and this server runs no tools",
            f"{path}.type",
            "unsupported_value",
        )
    kinds[kind](role, path, block, found)


def _text(role: str, path: str, block: Block, found: ChatMessages) -> None:
    _refuse_others(path, block, {"text"}, found.hints)
    found.add_text(role, path, _string(path, block, "text"))


def _thinking(role: str, path: str, block: Block, found: ChatMessages) -> None:
    _refuse_others(path, block, {"thinking", "signature"}, found.hints)
    if text := _string(path, block, "thinking"):
        found.add_thinking(path, text)


def _redacted(role: str, path: str, block: Block, found: ChatMessages) -> None:
    _refuse_others(path, block, {"data"}, found.hints)
    found.hints.leave(InvalidRequestError(f"{path} cannot be read here; leave it out", path))


def _tool_use(role: str, path: str, block: Block, found: ChatMessages) -> None:
    _refuse_others(path, block, {"id", "name", "input"}, found.hints)
    function = {"name": _string(path, block, "name"), "arguments": _arguments(f"{path}.input", block.get("input"))}
    found.add_call(path, {"id": _string(path, block, "id"), "type": "function", "function": function})


def _arguments(param: str, given: Any) -> str:
    """Return the arguments of a call as chats have them."""
    if given is None:
        return "{}"
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{param} must be an object", param, "invalid_type")
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequestError(f"{param} must hold numbers of JSON, not NaN or Infinity", param) from None


def _tool_result(role: str, path: str, block: Block, found: ChatMessages) -> None:
    _refuse_others(path, block, {"tool_use_id", "content", "is_error"}, found.hints)
    if failed := block.get("is_error"):
        param = f"{path}.is_error"
        if failed is not True:
            raise InvalidRequestError(f"{param} must be true or false", param, "invalid_type")
        found.hints.leave(InvalidRequestError(f"{param} is read by no chat template; say it in content", param))
    content = block.get("content")
    texts = _texts(f"{path}.content", "" if content is None else content, found.hints)
    found.add_result(path, _string(path, block, "tool_use_id"), texts)


Add = Callable[[str, str, Block, ChatMessages], None]
_BLOCKS: Mapping[str, Mapping[str, Add]] = {
    "user": {"text": _text, "tool_result": _tool_result},
    "assistant": {"text": _text, "tool_use": _tool_use, "thinking": _thinking, "redacted_thinking": _redacted},
}


def _texts(param: str, content: Any, hints: Hints) -> list[str]:
    """Return the texts of what may hold nothing else."""
    if isinstance(content, str):
        content = [_part(content)]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{param} must be a string or a list of text blocks", param, "invalid_type")
    texts = []
    for i, block in enumerate(content):
        path = f"{param}[{i}]"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise InvalidRequestError(
                f"{path} must be a block of type 'text': this model reads text only", path, "unsupported_value"
            )
        _refuse_others(path, block, {"text"}, hints)
        text = _string(path, block, "text")
        if text.startswith(BILLING):
            hints.leave(InvalidRequestError(f"{path} is for the bill; leave it out", path))
            continue
        texts.append(text)
    return texts


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _string(path: str, block: Block, name: str) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    param = f"{path}.{name}"
    if value is None:
        raise InvalidRequestError(f"{param} is missing", param, "missing_required_parameter")
    raise InvalidRequestError(f"{param} must be a string", param, "invalid_type")


def _refuse_others(path: str, block: Block, known: set[str], hints: Hints) -> None:
    for name, value in block.items():
        if name == "type" or name in known or value is None:
            continue
        param = f"{path}.{name[:100]}"
        error = InvalidRequestError(f"{param} is not supported; leave it out", param, "unknown_parameter")
        if name not in _HINTS:
            raise error
        hints.leave(error)
