"""Types of fields that several requests share, with the messages of a chat: exact, cheap, and with a JSON schema.

A wrong value raises with a message that reads on after "FIELD must ...".
Source: OpenAI API reference, "messages"; transformers' chat templates for what `tool_calls` look like there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import override

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_BIASES

IGNORED_HEADER = "x-squadron-ignored"
_PLACE = re.compile(r"\[\d+\]")
MAX_PROMPTS = 128
MAX_LABEL = 1024  # characters of a client's own ids
MAX_METADATA = 512  # characters of each of its labels
Prompt = str | list[int]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling each: two biases of one token would hide one another
_STRINGS = {"type": "array", "items": {"type": "string"}}
MAX_MESSAGES = 4096
MAX_CALLS = 128
# Of parts of a content: prefixes are cached automatically.
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


class Hints:
    """Those of one request that had no use. strict: they are refused (`--strict-fields`)."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, in the order in which they were found; never a name that a client made up."""
        return tuple(self._names)

    def ignore(self, name: str) -> None:
        """Note a field. Its places in lists are not told apart: a conversation may hold thousands of them."""
        self._names[_PLACE.sub("[]", name)] = None

    def leave(self, refusal: InvalidRequestError) -> None:
        """Note the field that `refusal` names, or raise it."""
        if self.strict or refusal.param is None:
            raise refusal
        self.ignore(refusal.param)


class Fields(BaseModel):
    """Base of all request objects: exact types, nothing unknown. A field that is null counts as not sent.

    hints: of fields that nothing reads, which clients send with the others all the same: name -> what the answer's
    header calls it. They are dropped where `Hints` are given as the context of validation, and those are not strict.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    hints: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, given: Any, info: ValidationInfo) -> Any:
        return cls._kept(given, info.context) if isinstance(given, dict) else given

    @classmethod
    def _kept(cls, given: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Return what counts of an object, and of what is unknown the first alone: an error is made for each."""
        known = _names(cls)
        unknown = next((name for name, value in given.items() if name not in known and cls._counts(value)), None)
        kept = {name: given[name] for name in known if name in given and cls._counts(given[name])}
        if isinstance(context, Hints) and not context.strict:
            for name, path in cls.hints.items():
                if kept.pop(name, None) is not None:
                    context.ignore(path)
        return kept if unknown is None else {**kept, unknown: given[unknown]}

    @classmethod
    def _counts(cls, value: Any) -> bool:
        """Whether a field with `value` was sent."""
        return value is not None


@cache
def _names(schema: type[Fields]) -> tuple[str, ...]:
    """What fields may be called in a request, hints among them."""
    return (*[one.alias or name for name, one in schema.model_fields.items()], *schema.hints)


def note(text: str, low: float | None = None, high: float | None = None, default: Any = None) -> Any:
    """Return a field's default and what the API document and the table of fields say of it."""
    bounds: JsonDict = {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    return Field(default=default, description=text, json_schema_extra=bounds or None)


def at_most(most: int, what: str) -> BeforeValidator:
    """Return the check that a list is not too long, before all of it is looked at. what: it holds, in the plural."""

    def checked(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            raise PydanticCustomError("count", f"must hold at most {most} {what}, not {len(value)}")
        return value

    return BeforeValidator(checked)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _starts_with_id(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and _starts_with_id(value)) else value
    if not isinstance(prompts, list) or not all(isinstance(one, str) or _is_ids(one) for one in prompts):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise PydanticCustomError("prompt_count", f"must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    return prompts


def _strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise PydanticCustomError("string_list", "must be a string or a list of strings")
    return tuple(strings)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value != [] and not _is_ids(value):
        raise PydanticCustomError("id_list", "must be a list of token ids")
    return tuple(value)


def _some_token_ids(value: Any) -> tuple[int, ...]:
    if not _is_ids(value):
        raise PydanticCustomError("id_list", "must be a list of at least one token id")
    return tuple(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """JSON has string keys only: `{"50256": -100}`."""
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_map", "must be an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias_count", f"must hold at most {MAX_BIASES} ids, not {len(value)}")
    return tuple([(_token_id(key), _bias(bias)) for key, bias in value.items()])


def _token_id(key: Any) -> int:
    if type(key) is int:
        return key
    if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
        raise PydanticCustomError("bias_id", "must have token ids as its keys, not {key}", {"key": repr(key)[:40]})
    return int(key)


def _bias(bias: Any) -> float:
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise PydanticCustomError("bias_value", "must have numbers between -100 and 100 as its values")
    return float(bias)


def _label(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL:
        raise PydanticCustomError("label", f"must be a string of at most {MAX_LABEL} characters")
    return value


def _labels(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 16:
        raise PydanticCustomError("labels", "must be an object of at most 16 strings")
    if not all(isinstance(one, str) and len(one) <= MAX_METADATA and len(key) <= 64 for key, one in value.items()):
        raise PydanticCustomError(
            "labels", f"must map keys of at most 64 characters to strings of at most {MAX_METADATA}"
        )
    return value


Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS}]}
    ),
]
Strings = Annotated[
    tuple[str, ...], BeforeValidator(_strings), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})
]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids), WithJsonSchema(_IDS)]
SomeTokenIds = Annotated[tuple[int, ...], BeforeValidator(_some_token_ids), WithJsonSchema({**_IDS, "minItems": 1})]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
Label = Annotated[str, BeforeValidator(_label), WithJsonSchema({"type": "string", "maxLength": MAX_LABEL})]
Labels = Annotated[
    dict[str, str],
    BeforeValidator(_labels),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16}),
]


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
            "content_part",
            "must hold parts of type 'text' only{instead}: this model reads text only",
            {"instead": f", and {kind[:40]!r} is not supported" if isinstance(kind, str) and kind != "text" else ""},
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


def _arguments(value: Any) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("arguments_type", "must be a string that holds a JSON object")
    try:
        if isinstance(from_json(value or "{}"), dict):
            return value or "{}"
    except ValueError:
        pass  # reported below: it is no JSON object either way
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
    tool_calls: Annotated[list[ToolCall], at_most(MAX_CALLS, "calls")] | None = None
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


Messages = Annotated[list[Message], Field(fail_fast=True), at_most(MAX_MESSAGES, "messages")]
