"""Which JSON schemas can be kept to exactly: every other one is refused by the name of what stands in the way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from engine.errors import InvalidRequestError

Schema = dict[str, Any] | bool
MAX_DEPTH = 32
MAX_NODES = 2000
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

# keyword -> what holds it back, "" where nothing does.
ENFORCED: Final = {
    "type": "",
    "enum": "beside it only `type`",
    "const": "beside it only `type`",
    "anyOf": "nothing that constrains beside it",
    "oneOf": "as anyOf; options of different types, or objects that differ in a required constant property",
    "allOf": "of one schema, nothing that constrains beside it",
    "$ref": "within the schema (`#` or `#/...`), nothing that constrains beside it",
    "$defs": "",
    "definitions": "",
    "properties": "written in the order in which they are listed",
    "required": "",
    "additionalProperties": "without it, an object with `properties` has no others",
    "minProperties": "up to the number of required properties; 1 for a map",
    "maxProperties": "for a map, or not below the number of properties",
    "propertyNames": "for a map (no `properties`): pattern, minLength, maxLength, enum",
    "items": "",
    "prefixItems": "without `items`, nothing follows them unless minItems wants it",
    "minItems": "",
    "maxItems": "",
    "minLength": "counted in characters, none of which is written as an escape; without pattern and format",
    "maxLength": "as minLength",
    "pattern": "what Python and ECMAScript share, without look-around, back-references, word boundaries and flags",
    "format": ", ".join(FORMATS),
    "minimum": "at most 15 digits are written, with no exponent",
    "maximum": "as minimum",
    "exclusiveMinimum": "as minimum; a number",
    "exclusiveMaximum": "as maximum; a number",
    "multipleOf": "whole numbers up to 100",
}
ANNOTATIONS: Final = (
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$schema",
    "$id",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
)
REFUSED: Final = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "patternProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "additionalItems",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "nullable",
    "discriminator",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
)
_ALONE = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_COUNT = 100_000


def parse_schema(text: str) -> Schema:
    """Return the schema that `text` spells, with all of it checked.

    Raises `InvalidRequestError` naming what is no JSON schema, or would not be kept to, by its JSON pointer.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        json.dumps(schema, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}", "structured") from error
    _Walk().check(schema, "", 0)
    checked: Schema = schema
    return checked


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _no_number(digits[:40])
    return number


def refuse(pointer: str, problem: str, code: str = "invalid_value") -> NoReturn:
    """Raise the error for the part of a schema that `pointer` names."""
    raise InvalidRequestError(f"json_schema at #{pointer}: {problem}", "structured", code)


def constraints(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of `schema` that constrain what may be written."""
    harmless = {*ANNOTATIONS, "$defs", "definitions"}
    return {name for name in schema if name not in harmless and not _vacuous(name, schema[name])}


def pointer_to(*parts: object) -> str:
    """Return the JSON pointer of a member."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _vacuous(name: str, value: Any) -> bool:
    return name.startswith("x-") or (name in ("uniqueItems", "nullable") and value is False)


class _Walk:
    def __init__(self) -> None:
        self._nodes = 0

    def check(self, schema: Any, pointer: str, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            refuse(pointer, f"a schema may hold at most {MAX_NODES} schemas")
        if depth > MAX_DEPTH:
            refuse(pointer, f"schemas may be nested at most {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            refuse(pointer, f"a schema is an object, true or false, not {_short(schema)}")
        for name, value in schema.items():
            _check_keyword(name, value, pointer)
        _check_company(schema, pointer)
        for child, place in _children(schema, pointer):
            self.check(child, place, depth + 1)


def _check_keyword(name: str, value: Any, pointer: str) -> None:
    if name in ANNOTATIONS or _vacuous(name, value):
        return
    place = pointer + pointer_to(name)
    if name not in ENFORCED:
        known = "cannot be enforced" if name in REFUSED else "is unknown"
        refuse(place, f"{name} {known}; leave it out", "not_supported")
    if name in _COUNTS and (not _is_integer(value) or not 0 <= value <= MAX_COUNT):
        refuse(place, f"{name} must be a whole number from 0 to {MAX_COUNT}, not {_short(value)}")
    if name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        refuse(place, f"{name} must be a number, not {_short(value)}")
    if name == "multipleOf" and not (value == int(value) and 1 <= value <= 100):
        refuse(
            place,
            f"multipleOf {_short(value)} cannot be enforced: only whole numbers from 1 to 100 can",
            "not_supported",
        )
    if name in ("properties", "$defs", "definitions") and not isinstance(value, dict):
        refuse(place, f"{name} must be an object, not {_short(value)}")
    if name in ("anyOf", "oneOf", "allOf", "enum", "prefixItems") and (not isinstance(value, list) or not value):
        refuse(place, f"{name} must be a list that is not empty, not {_short(value)}")
    if name == "required" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        refuse(place, f"required must be a list of names, not {_short(value)}")
    if name in ("pattern", "$ref", "format") and not isinstance(value, str):
        refuse(place, f"{name} must be a string, not {_short(value)}")
    if name == "format" and value not in FORMATS:
        refuse(place, f"format {_short(value)} cannot be enforced; known: {', '.join(FORMATS)}", "not_supported")
    if name == "$ref" and value != "#" and not value.startswith("#/"):
        refuse(place, f"$ref {_short(value)} must point into this schema, as #/$defs/name does", "not_supported")
    if name == "type":
        _check_type(value, place)


def _check_type(value: Any, place: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(each, str) or each not in TYPES for each in names):
        refuse(place, f"type must be one of {', '.join(TYPES)}, or a list of these, not {_short(value)}")


def _check_company(schema: dict[str, Any], pointer: str) -> None:
    """Refuse keywords that can be enforced, but not together."""
    found = constraints(schema)
    for name in _ALONE:
        allowed = {name, "type", "enum", "const"} if name in ("enum", "const") else {name}
        if name in found and found - allowed:
            other = sorted(found - allowed)[0]
            refuse(pointer, f"{name} and {other} together cannot be enforced; merge them", "not_supported")
    if len(schema.get("allOf", ())) > 1:
        refuse(pointer, "allOf of several schemas cannot be enforced; merge them", "not_supported")
    lengths = found & {"minLength", "maxLength"}
    for name in sorted(found & {"pattern", "format"}):
        others = (found & {"pattern", "format"} | lengths) - {name}
        if others:
            refuse(pointer, f"{name} and {sorted(others)[0]} together cannot be enforced", "not_supported")
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if schema.get(low, 0) > schema.get(high, MAX_COUNT):
            refuse(pointer, f"{low} is above {high}: nothing matches")


def _children(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    for name in ("properties", "$defs", "definitions"):
        for key, child in schema.get(name, {}).items():
            yield child, pointer + pointer_to(name, key)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for number, child in enumerate(schema.get(name, ())):
            yield child, pointer + pointer_to(name, number)
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield schema[name], pointer + pointer_to(name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
