"""What kinds of values a schema is about, and whether two schemas can match the same value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

from engine.grammar.schema_check import TYPES, Schema, constraints, refuse

Lookup = Callable[[str], Schema]
_OF_TYPE = {
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "patternProperties",
        "unevaluatedProperties",
    },
    "array": {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_MERGED = {"type", "properties", "required", "additionalProperties"}
_DEPTH = 8  # references that are followed to distinguish options


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


def resolved(schema: Schema, lookup: Lookup) -> Schema:
    """Return what a schema that is nothing but a reference points to, through others if need be."""
    for _ in range(_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema or "type" in schema:
            break
        schema = lookup(schema["$ref"])
    return schema


def narrowed(schemas: Sequence[Schema], beside: dict[str, Any], lookup: Lookup, at: str) -> list[Schema]:
    """Return the options of a schema, each with the `type` that stands beside them, False for one without values."""
    if "type" not in beside:
        return list(schemas)
    names = names_of(beside)
    return [_narrowed(each, names, lookup, at) for each in schemas]


def merged(schema: dict[str, Any], lookup: Lookup, at: str) -> Schema:
    """Return the one schema that the objects of `allOf`, and what stands beside it, come to together."""
    found: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    beside = {name: value for name, value in schema.items() if name in ("properties", "required")}
    for part in [*[resolved(each, lookup) for each in schema["allOf"]], {"type": "object", **beside}]:
        if part is True:
            continue
        if part is False:
            return False
        properties, more = part.get("properties", {}), part.get("additionalProperties", True)
        clash = any(found["properties"].get(name, each) != each for name, each in properties.items())
        if constraints(part) - _MERGED or part.get("type", "object") != "object" or more not in (True, {}) or clash:
            refuse(at, "allOf of several schemas cannot be enforced, except of objects; merge them", "not_supported")
        found["properties"] |= properties
        found["required"] += part.get("required", ())
        if "additionalProperties" in part:
            found["additionalProperties"] = True
    return found


def listed_names(schema: dict[str, Any], lookup: Lookup) -> list[str] | None:
    """Return the property names that `propertyNames` lists, None where it does not list them."""
    values = _constants(resolved(schema.get("propertyNames", True), lookup))
    return None if values is None else list(dict.fromkeys(value for value in values if isinstance(value, str)))


def marks(schemas: Sequence[Schema], lookup: Lookup) -> list[set[str]] | None:
    """Return the properties that each of `schemas` must have for no value to match two.

    None where two of them cannot be told apart.
    """
    solid = [resolved(each, lookup) for each in schemas]
    found: list[set[str]] = [set() for _ in solid]
    for one, other in combinations(range(len(solid)), 2):
        if _apart(solid[one], solid[other]):
            continue
        name = _mark(solid[one], solid[other], lookup)
        if name is None:
            return None
        found[one].add(name)
        found[other].add(name)
    return found


def requiring(schema: Schema, needed: Iterable[str]) -> Schema:
    """Return `schema` with more properties that are always written."""
    if not needed or not isinstance(schema, dict):
        return schema
    return {**schema, "required": [*schema.get("required", ()), *sorted(needed)]}


def _narrowed(schema: Schema, names: list[str], lookup: Lookup, at: str) -> Schema:
    if schema is False:
        return False
    own: dict[str, Any] = schema if isinstance(schema, dict) else {}
    if "$ref" not in own:
        given = names_of(own) if "type" in own else names
        both = [each for each in given if _within(each, names)] + [each for each in names if _within(each, given)]
        return {**own, "type": list(dict.fromkeys(both))} if both else False
    possible = _possible(resolved(own, lookup))
    if all(_within(each, names) for each in possible):
        return own
    if possible & _possible({"type": names}):
        refuse(at, "$ref cannot be enforced beside a type that is not its own", "not_supported")
    return False


def _within(name: str, names: Sequence[str]) -> bool:
    return name in names or (name == "integer" and "number" in names)


def _apart(one: Schema, other: Schema) -> bool:
    """Whether their types or constants say that no value matches both."""
    if one is False or other is False:
        return True
    if one is True or other is True:
        return False
    mine, theirs = _constants(one), _constants(other)
    if mine is not None and theirs is not None:
        return not any(value == each for value in mine for each in theirs)
    return not _possible(one) & _possible(other)


def _mark(one: Schema, other: Schema, lookup: Lookup) -> str | None:
    """Return the property by whose constants two objects differ, one that both require if there is one."""
    if not isinstance(one, dict) or not isinstance(other, dict) or _possible(one) | _possible(other) != {"object"}:
        return None
    found = []
    for name, schema in one.get("properties", {}).items():
        mine, theirs = resolved(schema, lookup), resolved(other.get("properties", {}).get(name, True), lookup)
        if _constants(mine) is not None and _apart(mine, theirs):
            found.append(name)
    required = set(one.get("required", ())) & set(other.get("required", ()))
    return next((name for name in found if name in required), found[0] if found else None)


def _constants(schema: Schema) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    values: list[Any] | None = schema.get("enum")
    if "const" in schema:
        values = [value for value in values or [schema["const"]] if same(value, schema["const"])]
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
