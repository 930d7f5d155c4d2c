"""Which JSON schemas can be kept to exactly: every other one is refused by the name of what stands in the way.

A keyword is enforced, refused, or says nothing of the values. One that JSON Schema does not know says nothing (Core
2020-12, 6.5): it is taken, and passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from engine.errors import InvalidRequestError

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Formats of JSON Schema that are not written; a name that it does not know says nothing (Validation 2020-12, 7.2.3).
OTHER_FORMATS = (
    "idn-email",
    "idn-hostname",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
)

# keyword -> what holds it back, "" where nothing does.
ENFORCED: Final = {
    "type": "",
    "enum": "beside it only `type`",
    "const": "beside it only `type`",
    "anyOf": "beside it only `type`",
    "oneOf": "as anyOf; options of different types, or objects with different constants of one "
    "property, which is then always written",
    "allOf": "of one schema, beside it only `type`; of objects that do not say different things of one property, nor "
    "bind others, beside it `properties` and `required` too",
    "not": "of `{}` only: nothing matches",
    "$ref": "within the schema (`#` or `#/...`), beside it only the `type` that it has",
    "$defs": "",
    "definitions": "",
    "properties": "written in the order in which they are listed",
    "required": "",
    "additionalProperties": "without it, an object with `properties` has no others",
    "unevaluatedProperties": "as additionalProperties",
    "patternProperties": "one pattern, for a map (no `properties`): all names match it",
    "minProperties": "up to the number of required properties; 1 for a map",
    "maxProperties": "for a map, or not below the number of properties",
    "propertyNames": "enum, const; for a map (no `properties`) pattern, format, minLength, maxLength too",
    "items": "a list of schemas is read as prefixItems",
    "prefixItems": "without `items`, nothing follows them unless minItems wants it",
    "additionalItems": "beside a list of `items`: what follows them",
    "unevaluatedItems": "as items",
    "minItems": "",
    "maxItems": "",
    "minLength": "counted in characters, none of which is written as an escape; beside `pattern` where that is one "
    "class, as `^[a-z]+$`; beside `format` where all that is written has such a length",
    "maxLength": "as minLength",
    "pattern": "what Python and ECMAScript share, without look-around, back-references, word boundaries and flags",
    "format": f"{', '.join(FORMATS)}; beside `pattern`, that is written; unknown names are annotations",
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
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "nullable",
    "discriminator",
    "$anchor",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$vocabulary",
)
REFUSED: Final = (
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
Schema = dict[str, Any] | bool
MAX_DEPTH = 32
MAX_NODES = 2000
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_CHILDREN = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
)
_ALONE = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_BESIDE = {"enum": {"const"}, "const": {"enum"}, "allOf": {"properties", "required"}}  # and `type`
_NAMED = {"properties", "required", "propertyNames"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_COUNT = 100_000


def constraints(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of `schema` that constrain what may be written."""
    places = {"$defs", "definitions"}
    return {name for name, value in schema.items() if name not in places and not says_nothing(name, value)}


def says_nothing(name: str, value: Any) -> bool:
    """Whether this keyword with this value lets everything pass."""
    if name == "format":
        return isinstance(value, str) and value not in FORMATS + OTHER_FORMATS
    if name in ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value == {}
    return (name not in ENFORCED and name not in REFUSED) or (name in ("uniqueItems", "not") and value is False)


def parse_schema(text: str) -> Schema:
    """Return the schema that `text` spells, with all of it checked.

    Raises `InvalidRequestError` naming what is no JSON schema, or would not be kept to, by its JSON pointer.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        json.dumps(schema, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}", "structured") from error
    _Walk(schema).run()
    checked: Schema = schema
    return checked


def find(root: Schema, target: str, at: str) -> Schema:
    """Return the schema that a `$ref` standing at `at` points to; raises `InvalidRequestError` if there is none."""
    node: Any = root
    for part in _parts(target):
        try:
            node = node[int(part) if isinstance(node, list) else part]
        except (KeyError, IndexError, ValueError, TypeError):
            refuse(at, f"$ref {target} points to nothing in this schema")
    if not isinstance(node, dict | bool):
        refuse(at, f"$ref {target} points to something that is no schema")
    return node


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


def pointer_to(*parts: object) -> str:
    """Return the JSON pointer of a member."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _parts(target: str) -> list[str]:
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in target.split("/")[1:]]


class _Walk:
    """Checks the whole of a schema, and what it refers to wherever that stands."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._nodes = 0
        self._seen: set[str] = set()
        self._targets: list[tuple[str, str]] = []  # each with the place that refers to it

    def run(self) -> None:
        self.check(self._root, "", 0)
        while self._targets:
            target, place = self._targets.pop()
            pointer = pointer_to(*_parts(target))
            if pointer not in self._seen:
                self.check(find(self._root, target, place), pointer, 0)

    def check(self, schema: Any, pointer: str, depth: int) -> None:
        self._seen.add(pointer)
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
        if "$ref" in schema:
            self._targets.append((schema["$ref"], pointer))
        for child, place in _children(schema, pointer):
            self.check(child, place, depth + 1)


def _check_keyword(name: str, value: Any, pointer: str) -> None:
    if says_nothing(name, value):
        return
    place = pointer + pointer_to(name)
    if name in REFUSED:
        refuse(place, f"{name} cannot be enforced; leave it out", "not_supported")
    if name == "not" and value is not True and value != {}:
        refuse(place, "not cannot be enforced, except of {}, which nothing matches", "not_supported")
    if name in _COUNTS and (not _is_integer(value) or not 0 <= value <= MAX_COUNT):
        refuse(place, f"{name} must be a whole number from 0 to {MAX_COUNT}, not {_short(value)}")
    if name in _NUMBERS:
        _check_number(name, value, place)
    if name in _MAPS and not isinstance(value, dict):
        refuse(place, f"{name} must be an object, not {_short(value)}")
    if name in (*_LISTS, "enum") and (not isinstance(value, list) or not value):
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


def _check_number(name: str, value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(place, f"{name} must be a number, not {_short(value)}")
    if name == "multipleOf" and not (value == int(value) and 1 <= value <= 100):
        refuse(
            place,
            f"multipleOf {_short(value)} cannot be enforced: only whole numbers from 1 to 100 can",
            "not_supported",
        )


def _check_type(value: Any, place: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(each, str) or each not in TYPES for each in names):
        refuse(place, f"type must be one of {', '.join(TYPES)}, or a list of these, not {_short(value)}")


def _check_company(schema: dict[str, Any], pointer: str) -> None:
    """Refuse keywords that can be enforced, but not together."""
    found = constraints(schema)
    for name in _ALONE:
        allowed = {name, "type"} | _BESIDE.get(name, set())
        if name in found and found - allowed:
            other = sorted(found - allowed)[0]
            refuse(pointer, f"{name} and {other} together cannot be enforced; merge them", "not_supported")
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        refuse(pointer, "items is a list, as before prefixItems: send one of them")
    if "patternProperties" in found and (len(schema["patternProperties"]) > 1 or found & _NAMED):
        refuse(
            pointer,
            "patternProperties of several patterns, or beside properties, cannot be enforced",
            "not_supported",
        )
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if schema.get(low, 0) > schema.get(high, MAX_COUNT):
            refuse(pointer, f"{low} is above {high}: nothing matches")


def _children(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    for name in _MAPS:
        for key, child in schema.get(name, {}).items():
            yield child, pointer + pointer_to(name, key)
    lists = (*_LISTS, "items") if isinstance(schema.get("items"), list) else _LISTS
    for name in lists:
        for number, child in enumerate(schema.get(name, ())):
            yield child, pointer + pointer_to(name, number)
    for name in _CHILDREN:
        if name in schema and name not in lists:
            yield schema[name], pointer + pointer_to(name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
