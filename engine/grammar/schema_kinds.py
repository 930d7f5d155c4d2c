"""What kinds of values a schema is about, and whether two schemas can match the same value."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from engine.grammar.schema_check import TYPES, Schema, constraints, refuse

Lookup = Callable[[str], Schema]
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_DEPTH = 8  # references that are followed to tell options apart


def names_of(schema: dict[str, Any]) -> list[str]:
    """Return what `type` says, as a list without doubles."""
    given = schema["type"]
    names = list(dict.fromkeys(given if isinstance(given, list) else [given]))
    return [name for name in names if name != "integer" or "number" not in names]


def types_of(schema: dict[str, Any], at: str) -> list[str]:
    """Return the types to write values of. Without `type`, its other keywords say it, if they are about one type."""
    if "type" in schema:
        return names_of(schema)
    found = [name for name, words in _OF_TYPE.items() if words & constraints(schema)]
    if len(found) != 1:
        refuse(at, f"type is needed beside keywords of several types ({', '.join(found)})")
    return found


def has_type(value: Any, names: Sequence[str]) -> bool:
    """Return whether `value` is of one of the types."""
    kinds = {bool: ["boolean"], int: ["integer", "number"], str: ["string"], list: ["array"], dict: ["object"]}
    found = kinds.get(type(value), ["null"])
    if isinstance(value, float):
        found = ["number", "integer"] if value.is_integer() else ["number"]
    return any(name in names for name in found)


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal (true is not 1)."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def disjoint(schemas: Sequence[Schema], lookup: Lookup) -> bool:
    """Return whether no value can match two of `schemas`, as far as it can be told."""
    solid = [_resolved(each, lookup) for each in schemas]
    return all(_apart(one, other, lookup) for one, other in combinations(solid, 2))


def _resolved(schema: Schema, lookup: Lookup) -> Schema:
    for _ in range(_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = lookup(schema["$ref"])
    return schema


def _apart(one: Schema, other: Schema, lookup: Lookup) -> bool:
    if one is False or other is False:
        return True
    if one is True or other is True:
        return False
    mine, theirs = _constants(one), _constants(other)
    if mine is not None and theirs is not None:
        return not any(value == each for value in mine for each in theirs)
    if not _possible(one) & _possible(other):
        return True
    return any(
        _apart(_resolved(one["properties"][name], lookup), _resolved(other["properties"][name], lookup), lookup)
        for name in set(one.get("required", ())) & set(other.get("required", ()))
        if name in one.get("properties", {})
        and name in other.get("properties", {})
        and _possible(one) == _possible(other) == {"object"}
        and _constants(_resolved(one["properties"][name], lookup)) is not None
    )


def _constants(schema: Schema) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _possible(schema: Schema) -> set[str]:
    if not isinstance(schema, dict):
        return set(TYPES)
    values = _constants(schema)
    if "type" in schema:
        names = set(names_of(schema))
    elif values is not None:
        names = {name for name in TYPES if any(has_type(value, [name]) for value in values)}
    else:
        names = set(TYPES)
    return names | ({"integer"} if "number" in names else set())
