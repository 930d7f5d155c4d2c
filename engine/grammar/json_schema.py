"""JSON schemas as grammars: what can be written is what the schema allows (or a part of it), and nothing else.

xgrammar reads JSON schemas itself, but lets texts through that do not match: it passes over keywords, counts no
escapes, and lets an additional property take the name of a declared one. So it gets rules that say it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from engine.errors import InvalidRequestError
from engine.grammar import json_text
from engine.grammar.ebnf import Rules, either, literal, repeat
from engine.grammar.formats import format_pattern
from engine.grammar.json_text import COLON, COMMA, listed
from engine.grammar.number_rules import Bounds, bounded
from engine.grammar.regex import convert
from engine.grammar.schema_check import MAX_DEPTH, Schema, constraints, parse_schema, pointer_to, refuse
from engine.grammar.schema_kinds import disjoint, has_type, names_of, same, types_of

NOTHING = ""  # no rule: nothing matches
_QUOTE = literal('"')


def schema_grammar(text: str) -> str:
    """Return the grammar of the JSON texts that match the schema `text`.

    Raises `InvalidRequestError` naming what cannot be enforced, and where it stands.
    """
    converter = _Converter(parse_schema(text))
    return converter.grammar()


def object_grammar() -> str:
    """Return the grammar of any JSON object."""
    rules = Rules()
    return rules.text(json_text.any_object(rules))


class _Converter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._rules = Rules()
        self._refs: dict[str, str] = {}

    def grammar(self) -> str:
        """Return the whole grammar."""
        root = self._ref("#", "")
        if root == NOTHING:
            refuse("", "nothing matches this schema")
        return self._rules.text(root)

    def _value(self, schema: Schema, at: str) -> str:
        """Return an expression for the values that match `schema`, NOTHING if there are none. at: its pointer."""
        if isinstance(schema, bool):
            return json_text.any_value(self._rules) if schema else NOTHING
        if "$ref" in schema:
            return self._ref(schema["$ref"], at)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._any_of(name, schema[name], at)
        if "enum" in schema or "const" in schema:
            return self._constants(schema, at)
        if not constraints(schema):
            return json_text.any_value(self._rules)
        options = [found for name in types_of(schema, at) if (found := self._typed(name, schema, at))]
        return self._rules.add(either(*options)) if options else NOTHING

    def _ref(self, target: str, at: str) -> str:
        if target not in self._refs:
            found = self._lookup(target, at)
            for _ in range(MAX_DEPTH):
                if not isinstance(found, dict) or "$ref" not in found:
                    break
                found = self._lookup(found["$ref"], at)
            else:
                refuse(at, f"$ref {target} points to itself, or through too many others")
            name = self._refs[target] = self._rules.reserve()
            body = self._value(found, unquote(target[1:]))
            if body in (NOTHING, name):
                refuse(at, "nothing matches this schema")
            self._rules.define(name, body)
        return self._refs[target]

    def _lookup(self, target: str, at: str) -> Schema:
        node: Any = self._root
        for part in target.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key) if isinstance(node, list) else key]
            except (KeyError, IndexError, ValueError, TypeError):
                refuse(at, f"$ref {target} points to nothing in this schema")
        if not isinstance(node, dict | bool):
            refuse(at, f"$ref {target} points to something that is no schema")
        return node

    def _any_of(self, name: str, schemas: Sequence[Schema], at: str) -> str:
        if name == "oneOf" and not disjoint(schemas, lambda target: self._lookup(target, at)):
            refuse(
                at,
                "oneOf cannot be enforced where its options may match the same value; use anyOf, or give the "
                "options a required property with different constants",
                "not_supported",
            )
        found = [self._value(each, at + pointer_to(name, number)) for number, each in enumerate(schemas)]
        options = [each for each in found if each != NOTHING]
        return self._rules.add(either(*options)) if options else NOTHING

    def _constants(self, schema: dict[str, Any], at: str) -> str:
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        if "type" in schema:
            values = [value for value in values if has_type(value, names_of(schema))]
        if not values:
            refuse(at, "no value of enum or const is of this type, or both: nothing matches")
        return self._rules.add(either(*dict.fromkeys(map(json_text.constant, values))))

    def _typed(self, name: str, schema: dict[str, Any], at: str) -> str:
        if name == "object":
            return self._object(schema, at)
        if name == "array":
            return self._array(schema, at)
        if name == "string":
            return self._string(schema, at)
        if name in ("integer", "number"):
            return self._number(schema, at, name == "integer")
        if name == "boolean":
            return either(json_text.constant(True), json_text.constant(False))
        return json_text.constant(None)

    def _string(self, schema: dict[str, Any], at: str) -> str:
        pattern = schema.get("pattern")
        if "format" in schema:
            pattern = format_pattern(schema["format"])
        if pattern is None:
            return json_text.string(self._rules, schema.get("minLength", 0), schema.get("maxLength"))
        try:
            found = convert(pattern, json_text.spell_in_string, self._rules)
        except InvalidRequestError as error:
            refuse(at + "/pattern", str(error), error.code)
        anything = repeat(json_text.CHAR, 0, None)
        before, behind = ("" if fixed else f"{anything} " for fixed in (found.begins, found.ends))
        return f"{_QUOTE} {before}{self._rules.add(found.body)} {behind}{_QUOTE}"

    def _number(self, schema: dict[str, Any], at: str, whole: bool) -> str:
        found = _bounds(schema)
        if found == Bounds():
            return self._rules.add(json_text.INTEGER if whole else json_text.NUMBER)
        try:
            return bounded(self._rules, found, whole)
        except InvalidRequestError as error:
            refuse(at, str(error), error.code)

    def _array(self, schema: dict[str, Any], at: str) -> str:
        prefix, least, most = schema.get("prefixItems", []), schema.get("minItems", 0), schema.get("maxItems")
        item: Schema = schema.get("items", not prefix or least > len(prefix))
        heads = [self._value(each, at + pointer_to("prefixItems", number)) for number, each in enumerate(prefix)]
        rest = self._value(item, at + "/items")
        if NOTHING in heads:
            heads, rest = heads[: heads.index(NOTHING)], NOTHING
        top = len(heads) if rest == NOTHING else most
        if most is not None and top is not None:
            top = min(top, most)
        if top is not None and least > top:
            return NOTHING
        return listed("[", self._items(heads, rest, least, top), "]")

    def _items(self, heads: list[str], rest: str, least: int, most: int | None) -> str:
        """Return an expression for `least` to `most` items with commas: one each of `heads`, then `rest`."""
        if most is not None:
            heads = heads[:most]
        count = len(heads)
        tail = ""
        if rest != NOTHING and (most is None or most > count):
            room = None if most is None else most - count
            if count:
                tail = repeat(f"{COMMA} {rest}", max(0, least - count), room)
            else:
                more = repeat(f"{COMMA} {rest}", max(0, least - 1), None if room is None else room - 1)
                tail = f"{rest} {more}"
                return tail if least else f"({tail})?"
        for number in reversed(range(count)):
            body = f"{COMMA + ' ' if number else ''}{heads[number]} {tail}"
            tail = self._rules.add(body) if number < least else f"({self._rules.add(body)})?"
        return tail or '""'

    def _object(self, schema: dict[str, Any], at: str) -> str:
        properties: dict[str, Schema] = schema.get("properties", {})
        extra: Schema = schema.get("additionalProperties", not properties)
        required = dict.fromkeys(schema.get("required", ()))
        wanted = properties | {name: extra for name in required if name not in properties}
        if not wanted:
            return self._map(schema, extra, at)
        if "propertyNames" in schema:
            refuse(at, "propertyNames beside properties cannot be enforced", "not_supported")
        pairs: list[tuple[str, bool]] = []
        for name, each in wanted.items():
            value = self._value(each, at + pointer_to("properties", name))
            if value == NOTHING and name in required:
                return NOTHING
            if value != NOTHING:
                pairs.append((self._rules.add(f"{json_text.constant(name)} {COLON} {value}"), name in required))
        value = self._value(extra, at + "/additionalProperties")
        self._check_counts(schema, len(required), None if value else len(pairs), at)
        other = f"{json_text.other_name(self._rules, wanted)} {COLON} {value}" if value else NOTHING
        return listed("{", self._members(pairs, other), "}")

    def _check_counts(self, schema: dict[str, Any], least: int, most: int | None, at: str) -> None:
        if schema.get("minProperties", 0) > least:
            refuse(at, "minProperties above the number of required properties cannot be enforced", "not_supported")
        if "maxProperties" in schema and (most is None or schema["maxProperties"] < most):
            refuse(at, "maxProperties below the number of properties cannot be enforced", "not_supported")

    def _members(self, pairs: list[tuple[str, bool]], other: str) -> str:
        """Return an expression for the members in their order, the optional ones maybe left out, then others."""
        first = f"({other} ({COMMA} {other})*)?" if other else '""'
        later = f"({COMMA} {other})*" if other else '""'
        for pair, required in reversed(pairs):
            begun, going_on = f"{pair} {later}", f"{COMMA} {pair} {later}"
            first = self._rules.add(begun if required else f"{begun} | {first}")
            later = self._rules.add(going_on if required else f"{going_on} | {later}")
        return first

    def _map(self, schema: dict[str, Any], extra: Schema, at: str) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if least > 1:
            refuse(at, "minProperties above 1 cannot be enforced for a map: names may be repeated", "not_supported")
        value = self._value(extra, at + "/additionalProperties")
        names = self._names(schema.get("propertyNames", True), at + "/propertyNames")
        if NOTHING in (value, names) or most == 0:
            return listed("{", '""', "}") if least == 0 else NOTHING
        member = f"{names} {COLON} {value}"
        more = repeat(f"{COMMA} {member}", 0, None if most is None else most - 1)
        return listed("{", f"{member} {more}" if least else f"({member} {more})?", "}")

    def _names(self, schema: Schema, at: str) -> str:
        if isinstance(schema, bool):
            return json_text.string(self._rules) if schema else NOTHING
        found = constraints(schema) - {"pattern", "minLength", "maxLength", "enum", "type"}
        if found or schema.get("type", "string") != "string":
            refuse(
                at, "of propertyNames only pattern, minLength, maxLength and enum can be enforced", "not_supported"
            )
        return self._value({"type": "string", **schema}, at)


def _bounds(schema: dict[str, Any]) -> Bounds:
    lows = [
        (Decimal(repr(schema[name])), name != "minimum") for name in ("minimum", "exclusiveMinimum") if name in schema
    ]
    highs = [
        (Decimal(repr(schema[name])), name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in schema
    ]
    low, low_open = max(lows, default=(None, False))
    high, closed = min(highs, default=(None, True))
    return Bounds(low, high, low_open, not closed, int(schema.get("multipleOf", 1)))
