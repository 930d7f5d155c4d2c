"""JSON schemas as grammars: what can be written is what the schema allows (or a part of it), and nothing else.

xgrammar reads JSON schemas itself, but lets texts through that do not match: it passes over keywords, counts no
escapes, and lets an additional property take the name of a declared one. So it gets rules that say it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from engine.errors import InvalidRequestError
from engine.grammar import json_text
from engine.grammar.gbnf import GrammarRules, either, literal, repeat
from engine.grammar.json_text import COLON, COMMA, listed
from engine.grammar.regex import convert
from engine.grammar.scalar_rules import NumberBounds, bounded, bounds_of, counted_class, string_pattern
from engine.grammar.schema_check import MAX_DEPTH, Schema, constraints, find, parse_schema, pointer_to, refuse
from engine.grammar.schema_types import (
    Lookup,
    has_type,
    listed_names,
    marks,
    merged,
    names_of,
    narrowed,
    requiring,
    resolved,
    same,
    types_of,
)

NOTHING = ""  # no rule: nothing matches
_QUOTE = literal('"')
_OF_NAMES = {"const", "enum", "format", "maxLength", "minLength", "pattern", "type"}


def schema_grammar(text: str) -> str:
    """Return the grammar of the JSON texts that match the schema `text`.

    Raises `InvalidRequestError` naming what cannot be enforced, and where it stands.
    """
    rules = GrammarRules()
    return rules.text(schema_rules(text, rules))


def schema_rules(text: str, rules: GrammarRules) -> str:
    """Return an expression for the same, over rules that are added to `rules`."""
    return _Converter(parse_schema(text), rules).root()


def object_grammar() -> str:
    """Return the grammar of any JSON object."""
    rules = GrammarRules()
    return rules.text(json_text.any_object(rules))


class _Converter:
    def __init__(self, root: Schema, rules: GrammarRules) -> None:
        self._root = root
        self._rules = rules
        self._refs: dict[tuple[str, frozenset[str]], str] = {}

    def root(self) -> str:
        """Return the expression for the whole schema."""
        return self._ref("#", "")

    def _value(self, schema: Schema, at: str) -> str:
        """Return an expression for the values that match `schema`, NOTHING if there are none. at: its pointer."""
        if schema is False or (schema is not True and schema.get("not") in (True, {})):
            return NOTHING
        if schema is True or not constraints(schema):
            return json_text.any_value(self._rules)
        if "$ref" in schema:
            return self._referred(schema, at)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._combined(name, schema, at)
        if "enum" in schema or "const" in schema:
            return self._constants(schema, at)
        options = [found for name in types_of(schema, at) if (found := self._typed(name, schema, at))]
        return self._rules.add(either(*options)) if options else NOTHING

    def _referred(self, schema: dict[str, Any], at: str) -> str:
        (found,) = narrowed([{"$ref": schema["$ref"]}], schema, self._find_from(at), at)
        return self._ref(schema["$ref"], at) if found else NOTHING

    def _ref(self, target: str, at: str, needed: Iterable[str] = ()) -> str:
        """Return the rule of what a reference points to. needed: properties that are always written."""
        key = target, frozenset(needed)
        if key not in self._refs:
            found = self._target(target, at)
            name = self._refs[key] = self._rules.reserve()
            body = self._value(requiring(found, key[1]), unquote(target[1:]))
            if body in (NOTHING, name):
                refuse(at, "nothing matches this schema")
            self._rules.define(name, body)
        return self._refs[key]

    def _target(self, target: str, at: str) -> Schema:
        """Return what a reference points to, through others up to one that has a `type` beside it."""
        chain = [find(self._root, target, at)]
        while isinstance(last := chain[-1], dict) and "$ref" in last:
            chain.append(find(self._root, last["$ref"], at))
            if len(chain) > MAX_DEPTH:
                refuse(at, f"$ref {target} points to itself, or through too many others")
        return next((each for each in chain if isinstance(each, dict) and "type" in each), chain[-1])

    def _find_from(self, at: str) -> Lookup:
        return lambda target: find(self._root, target, at)

    def _combined(self, name: str, schema: dict[str, Any], at: str) -> str:
        lookup, schemas = self._find_from(at), schema[name]
        if name == "allOf" and (len(schemas) > 1 or constraints(schema) - {"allOf", "type"}):
            schemas = [merged(schema, lookup, at)]
        schemas = narrowed(schemas, schema, lookup, at)
        needed = marks(schemas, lookup) if name == "oneOf" else [set() for _ in schemas]
        if needed is None:
            refuse(
                at,
                "oneOf cannot be enforced where its options may match the same value; use anyOf, or give the "
                "options a property with different constants",
                "not_supported",
            )
        found = [
            self._option(each, more, at + pointer_to(name, number))
            for number, (each, more) in enumerate(zip(schemas, needed, strict=True))
        ]
        options = [each for each in found if each != NOTHING]
        return self._rules.add(either(*options)) if options else NOTHING

    def _option(self, schema: Schema, needed: set[str], at: str) -> str:
        if isinstance(schema, dict) and "$ref" in schema and needed:
            return self._ref(schema["$ref"], at, needed)
        return self._value(requiring(schema, needed), at)

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
        pattern = string_pattern(schema, at)
        if pattern is None:
            return json_text.string(self._rules, schema.get("minLength", 0), schema.get("maxLength"))
        try:
            counted = counted_class(pattern, self._rules)
            if counted is not None:
                return counted
            found = convert(pattern, json_text.spell_in_string, self._rules)
        except InvalidRequestError as error:
            refuse(at + "/pattern", str(error), error.code)
        anything = repeat(json_text.CHAR, 0, None)
        before, behind = ("" if fixed else f"{anything} " for fixed in (found.begins, found.ends))
        return f"{_QUOTE} {before}{self._rules.add(found.body)} {behind}{_QUOTE}"

    def _number(self, schema: dict[str, Any], at: str, whole: bool) -> str:
        found = bounds_of(schema)
        if found == NumberBounds():
            return self._rules.add(json_text.INTEGER if whole else json_text.NUMBER)
        try:
            return bounded(self._rules, found, whole)
        except InvalidRequestError as error:
            refuse(at, str(error), error.code)

    def _array(self, schema: dict[str, Any], at: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        listed_before = isinstance(schema.get("items"), list)  # as JSON Schema had it before 2020
        first, others = ("items", "additionalItems") if listed_before else ("prefixItems", "items")
        prefix = schema.get(first, [])
        free: Schema = schema.get("unevaluatedItems", not prefix or least > len(prefix))
        heads = [self._value(each, at + pointer_to(first, number)) for number, each in enumerate(prefix)]
        rest = self._value(schema.get(others, free), at + pointer_to(others))
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
        other: Schema = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        required = dict.fromkeys(schema.get("required", ()))
        wanted = properties | {name: other for name in required if name not in properties}
        if not wanted:
            return self._map(schema, other, at)
        extra = other if "additionalProperties" in schema or "unevaluatedProperties" in schema else not properties
        if "propertyNames" in schema:
            names = self._listed_names(schema, at)
            if any(name not in names for name in required):
                return NOTHING
            wanted, extra = {name: wanted.get(name, other) for name in names}, False
        pairs: list[tuple[str, bool]] = []
        for name, each in wanted.items():
            value = self._value(each, at + pointer_to("properties", name))
            if value == NOTHING and name in required:
                return NOTHING
            if value != NOTHING:
                pairs.append((self._rules.add(f"{json_text.constant(name)} {COLON} {value}"), name in required))
        value = self._value(extra, at + "/additionalProperties")
        self._check_counts(schema, len(required), None if value else len(pairs), at)
        more = f"{json_text.other_name(self._rules, wanted)} {COLON} {value}" if value else NOTHING
        return listed("{", self._members(pairs, more), "}")

    def _check_counts(self, schema: dict[str, Any], least: int, most: int | None, at: str) -> None:
        if schema.get("minProperties", 0) > least:
            refuse(at, "minProperties above the number of required properties cannot be enforced", "not_supported")
        if "maxProperties" in schema and (most is None or schema["maxProperties"] < most):
            refuse(at, "maxProperties below the number of properties cannot be enforced", "not_supported")

    def _members(self, pairs: list[tuple[str, bool]], other: str) -> str:
        """Return an expression for the members in their order, the optional ones maybe left out, then others.

        A comma comes before it is said which member follows: else each token that ends a member is held against all.
        """
        some = f"{other} ({COMMA} {other})*" if other else NOTHING  # one member and what follows
        later = f"({COMMA} {other})*" if other else '""'
        any_required = False
        for pair, required in reversed(pairs):
            here = f"{pair} {later}"
            some = self._rules.add(here if required or some == NOTHING else f"{here} | {some}")
            any_required = any_required or required
            later = self._rules.add(f"{COMMA} {some}" if any_required else f'"" | {COMMA} {some}')
        return some if any_required else f"({some})?" if some != NOTHING else '""'

    def _map(self, schema: dict[str, Any], extra: Schema, at: str) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if least > 1:
            refuse(at, "minProperties above 1 cannot be enforced for a map: names may be repeated", "not_supported")
        allowed, where = schema.get("propertyNames", True), "/propertyNames"
        for pattern, each in schema.get("patternProperties", {}).items():
            allowed, where, extra = {"pattern": pattern}, "/patternProperties", each
        value = self._value(extra, at + "/additionalProperties")
        names = self._names(allowed, at + where)
        if NOTHING in (value, names) or most == 0:
            return listed("{", '""', "}") if least == 0 else NOTHING
        member = f"{names} {COLON} {value}"
        more = repeat(f"{COMMA} {member}", 0, None if most is None else most - 1)
        return listed("{", f"{member} {more}" if least else f"({member} {more})?", "}")

    def _names(self, schema: Schema, at: str) -> str:
        schema = resolved(schema, self._find_from(at))
        if isinstance(schema, bool):
            return json_text.string(self._rules) if schema else NOTHING
        if constraints(schema) - _OF_NAMES or schema.get("type", "string") != "string":
            known = ", ".join(sorted(_OF_NAMES))
            refuse(at, f"of propertyNames only {known} can be enforced", "not_supported")
        return self._value({"type": "string", **schema}, at)

    def _listed_names(self, schema: dict[str, Any], at: str) -> list[str]:
        names = listed_names(schema, self._find_from(at))
        if names is None:
            refuse(at, "propertyNames beside properties cannot be enforced, unless it is an enum", "not_supported")
        return names
