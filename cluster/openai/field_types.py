"""Types that fields of several requests share: exact, cheap to check, and with a JSON schema for the API document.

A wrong value raises with a message that reads on after "FIELD must ...".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from cluster.openai.hints import Hints
from engine.sampling_params import MAX_BIASES

MAX_PROMPTS = 128
MAX_LABEL = 1024  # characters of a client's own ids
MAX_METADATA = 512  # characters of each of its labels
Prompt = str | list[int]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling each: two biases of one token would hide one another
_STRINGS = {"type": "array", "items": {"type": "string"}}


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
