"""The messages of a conversation, as clients send them and as chat templates read them.

Source: OpenAI API reference, "messages"; transformers' chat templates for what `tool_calls` look like there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import override

from cluster.openai.field_types import Fields
from cluster.openai.hints import Hints

MAX_MESSAGES = 4096
MAX_CALLS = 128
# Of parts of a content: prefixes are cached of their own accord.
PART_HINTS = ("cache_control", "prompt_cache_breakpoint")
# What clients' own libraries add to an answer, and send back with it.
_ADDED = ("annotations", "parsed", "provider_specific_fields", "reasoning_details")
_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


def _text(value: Any, info: ValidationInfo) -> str:
    """Content is a string or a list of text parts; the parts become one string, a line each."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of parts of type 'text'")
    hints = info.context if isinstance(info.context, Hints) else Hints(strict=True)
    return "\n".join([_part_text(part, hints) for part in value])


def _part_text(part: Any, hints: Hints) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise PydanticCustomError(
            "content_part", "must hold parts of type 'text' only: this model reads no other input"
        )
    for more, value in part.items():
        if more in ("type", "text") or value is None:
            continue
        if more in PART_HINTS and not hints.strict:
            hints.ignore(f"messages[].content[].{more}")
            continue
        raise PydanticCustomError(
            "content_part_field",
            "must hold parts of type and text alone; {name} is not supported",
            {"name": more[:100]},
        )
    text: str = part["text"]
    return text


def _few_messages(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise PydanticCustomError("message_count", f"must hold at most {MAX_MESSAGES} messages, not {len(value)}")
    return value


def _few_calls(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_CALLS:
        raise PydanticCustomError("call_count", f"must hold at most {MAX_CALLS} calls, not {len(value)}")
    return value


def _arguments(value: Any) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("arguments_type", "must be a string that holds a JSON object")
    try:
        if isinstance(from_json(value or "{}"), dict):
            return value or "{}"
    except ValueError:
        pass  # told below: it is no JSON object either way
    raise PydanticCustomError("arguments_json", "must be a string that holds a JSON object")


class CalledFunction(Fields):
    """A function that the model called."""

    hints: ClassVar[Mapping[str, str]] = {"parsed_arguments": "messages[].tool_calls[].function.parsed_arguments"}
    name: str
    arguments: Annotated[str, BeforeValidator(_arguments), WithJsonSchema({"type": "string"})]


class ToolCall(Fields):
    """A call that the assistant made earlier in the conversation. index: of pieces of calls that were streamed."""

    hints: ClassVar[Mapping[str, str]] = {"index": "messages[].tool_calls[].index"}
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it: its arguments are an object."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Fields):
    """One message of a conversation; `developer` is today's name of `system`.

    Clients send answers back as they came, so fields that are null or empty count as not sent. An assistant that
    only called tools, or only thought, said nothing. `reasoning` is vLLM's newer name of `reasoning_content`.
    """

    hints: ClassVar[Mapping[str, str]] = {name: f"messages[].{name}" for name in _ADDED}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str, BeforeValidator(_text), WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]})
    ]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], BeforeValidator(_few_calls)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @classmethod
    @override
    def _kept(cls, given: Mapping[str, Any], context: Any) -> dict[str, Any]:
        kept = super()._kept(given, context)
        if kept.get("role") == "assistant":
            kept.setdefault("content", "")
        return kept

    @classmethod
    @override
    def _counts(cls, value: Any) -> bool:
        return value not in (None, [], {})


Messages = Annotated[list[Message], Field(fail_fast=True), BeforeValidator(_few_messages)]
