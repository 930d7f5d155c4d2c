"""JSON schemas as grammars: every text that is allowed matches the schema; what would not be kept to is refused."""

import json
from pathlib import Path
from random import Random

import jsonschema
import pytest

from engine.errors import InvalidRequestError
from engine.grammar.json_schema import object_grammar, schema_grammar
from engine.grammar.schema_check import ANNOTATIONS, ENFORCED, FORMATS, REFUSED, constraints
from tests.grammar_walk import compiled, random_schema, texts

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "structured-output.md"
STR, INT, NUM = {"type": "string"}, {"type": "integer"}, {"type": "number"}
OBJECT = {"type": "object", "properties": {"a": STR}, "required": ["a"], "additionalProperties": False}
LIST = {
    "type": "object",
    "properties": {"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
}
KEPT = [
    {},
    True,
    {"type": "object"},
    {"type": "array"},
    {"type": "object", "properties": {"a": STR}},
    {"type": "object", "required": ["b"]},
    {"type": "object", "properties": {"a": INT}, "additionalProperties": STR},
    {
        "type": "object",
        "properties": {"ab": INT, "a": {"const": 3}, 'q"': INT},
        "additionalProperties": {"type": "null"},
    },
    {"type": "object", "properties": {"a": INT, "b": INT, "c": INT}, "required": ["b"]},
    {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a"], "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": INT},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INT},
    {"type": "object", "properties": {"a": False, "b": INT}},
    {"type": "object", "properties": {'a"b\\c\nä/': INT}, "required": ['a"b\\c\nä/']},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [INT, STR]},
    {"type": "array", "prefixItems": [INT, STR], "items": {"type": "boolean"}, "minItems": 3},
    {"type": "array", "prefixItems": [INT, STR, STR], "maxItems": 2, "minItems": 1},
    {"type": "array", "prefixItems": [INT], "minItems": 3},
    {"type": "array", "items": INT, "uniqueItems": False},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"minLength": 3},
    {"type": "string", "pattern": "^a"},
    {"type": "string", "pattern": "^(?:a|b)$"},
    {"type": "string", "pattern": '^"\\\\[^a]\\s\\x01$'},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
    {"type": "integer", "minimum": 2.5, "maximum": 4.5},
    {"type": "integer", "minimum": -(10**20), "maximum": 10**20},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 1e-9, "maximum": 1e-8},
    {"type": "number", "maximum": -123456.789},
    {"type": "integer", "multipleOf": 7},
    {"enum": ["a", 1, None, True, 1.5, {"b": [1, 2]}, []]},
    {"type": "string", "enum": ["a", 1, True]},
    {"enum": [1, True, "b"], "const": True},
    {"const": {"b": [1, "ä\n\x7f\u2028 </"]}},
    {"enum": [1e300, 1e-7, 12345678901234567890123]},
    {"anyOf": [STR, INT]},
    {"oneOf": [STR, INT, {"type": "null"}]},
    {"allOf": [OBJECT]},
    {"$defs": {"x": OBJECT}, "$ref": "#/$defs/x"},
    {"definitions": {"a~b/c d": OBJECT}, "$ref": "#/definitions/a~0b~1c%20d"},
    {"$defs": {"n": LIST}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "v": value}, "required": ["kind", "v"]}
            for kind, value in (("s", STR), ("i", INT))
        ]
    },
    *[{"type": "string", "format": name} for name in FORMATS if name != "time"],
    {"anyOf": [{"not": {}}, INT, {"not": False, "type": "null"}]},
    {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": STR},
    {"type": "object", "unevaluatedProperties": INT},
    {"type": "object", "properties": {"a": INT}, "required": ["b", "a"]},
    {"type": "object", "patternProperties": {"^x-[ab]{1,2}$": INT}, "additionalProperties": False},
    {"type": "object", "patternProperties": {}},
    {"type": "object", "propertyNames": {"const": "x"}, "minProperties": 1},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["x", "y", 3]}}},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "required": ["y"], "additionalProperties": INT},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "properties": {"x": INT, "z": INT}},
    {"type": "array", "prefixItems": [INT], "unevaluatedItems": STR},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INT, STR]},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INT],
        "additionalItems": STR,
        "minItems": 2,
    },
    {"type": "string", "anyOf": [{"format": "ipv4"}, {"enum": ["a", 3]}, INT, True, False]},
    {
        "type": ["integer", "string"],
        "oneOf": [{"type": ["number", "null"]}, {"$ref": "#/$defs/s"}],
        "$defs": {"s": STR},
    },
    {"type": "object", "$ref": "#/$defs/o", "$defs": {"o": OBJECT}},
    {"type": "number", "anyOf": [INT, STR, {"$ref": "#/$defs/s"}], "$defs": {"s": STR}},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "s"}, "v": STR}, "required": ["v"]},
            {"type": "object", "properties": {"kind": {"enum": ["i", "j"]}, "v": INT}},
            {"type": "object", "properties": {"kind": {"type": "null"}, "v": NUM}, "required": ["v"]},
        ]
    },
    {"allOf": [OBJECT | {"additionalProperties": True}, True, {"properties": {"b": INT}}]},
    {
        "allOf": [{"$ref": "#/$defs/base"}, {"type": "object", "properties": {"b": {"anyOf": [INT, {"$ref": "#"}]}}}],
        "properties": {"a": STR, "c": INT},
        "required": ["c"],
        "$defs": {"base": {"type": "object", "properties": {"a": STR}, "required": ["a"]}},
    },
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^\\d{2,9}$", "maxLength": 4},
    {"type": "string", "pattern": "^[^\\]a]{4}$", "minLength": 3},
    {"type": "string", "format": "date", "minLength": 1, "maxLength": 10},
    {"type": "string", "format": "date", "pattern": "^2024-0[1-9]-11$"},
    {"type": "string", "format": "colour", "maxLength": 4},
    {"type": "integer", "format": "int32"},
    {"components": {"schemas": {"x": OBJECT}}, "$ref": "#/components/schemas/x"},
    {"type": "string", "colour": "red", "maxLength": 2},
]
NOT_KEPT = [
    ({"not": STR}, "not"),
    ({"if": INT, "then": {"minimum": 3}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INT}, "contains"),
    ({"type": "object", "patternProperties": {"^x": INT, "^y": INT}}, "patternProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    (
        {"$defs": {"x": {"type": "string", "$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
        "$ref",
    ),
    ({"type": "array", "items": [INT], "prefixItems": [INT]}, "items"),
    ({"not": {"type": "string"}}, "#/not"),
    ({"properties": {"a": INT}, "patternProperties": {"^x": INT}}, "patternProperties"),
    ({"properties": {"a": INT}, "propertyNames": {"pattern": "^x"}}, "propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "nothing matches"),
    ({"propertyNames": {"type": "integer"}}, "propertyNames"),
    ({"type": "object", "$ref": "#/$defs/x", "$defs": {"x": {}}}, "$ref"),
    ({"$ref": "#/colour", "colour": {"type": "array", "uniqueItems": True}}, "#/colour/uniqueItems"),
    ({"$ref": "#/default", "default": {"type": "obj"}}, "#/default/type"),
    ({"$ref": "#/title", "title": "x"}, "$ref"),
    ({"type": "string", "format": "uri", "maxLength": 100}, "format and maxLength"),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "string", "pattern": "^[a-z]{2}$", "minLength": 3}, "pattern and minLength"),
    ({"type": "string", "format": "regex"}, "format"),
    ({"type": "string", "pattern": "(a)\\1"}, "#/pattern"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern and maxLength"),
    ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
    ({"type": "integer", "multipleOf": 101}, "multipleOf"),
    ({"type": "number", "minimum": 1e20}, "minimum"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum and maximum"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"oneOf": [INT, NUM]}, "oneOf"),
    ({"oneOf": [OBJECT, {"type": "object", "properties": {"a": INT}}]}, "oneOf"),
    ({"allOf": [STR, {"maxLength": 2}]}, "allOf"),
    ({"allOf": [{"properties": {"a": INT}}, {"properties": {"a": STR}}]}, "allOf"),
    ({"allOf": [OBJECT, {"properties": {"b": STR}}]}, "allOf"),
    ({"allOf": [{"$ref": "#"}, {"properties": {"b": STR}}]}, "allOf"),
    ({"allOf": [{"properties": {"b": STR}}, False]}, "nothing matches"),
    ({"type": "object", "properties": {"a": INT}, "anyOf": [{"required": ["a"]}]}, "anyOf and properties"),
    ({"$defs": {"x": STR}, "$ref": "#/$defs/x", "maxLength": 2}, "$ref and maxLength"),
    ({"$ref": "https://example.org/s"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}, "$ref"),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 2}, "minProperties"),
    (
        {"type": "object", "properties": {"a": INT}, "additionalProperties": False, "required": ["b"]},
        "nothing matches",
    ),
    ({"type": "obj"}, "type"),
    ({"type": []}, "type"),
    ({"type": "string", "enum": [1]}, "enum"),
    ({"enum": []}, "enum"),
    ({"minLength": 3, "minimum": 2}, "type is needed"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"type": "string", "maxLength": 10**9}, "maxLength"),
    (False, "nothing matches"),
    ([], "#"),
]


def check(schema, count):
    dialect = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = dialect(schema, format_checker=jsonschema.FormatChecker())
    found = texts(compiled(schema_grammar(json.dumps(schema))), count)
    for text in found:
        validator.validate(json.loads(text))
    return found


@pytest.mark.parametrize("schema", KEPT, ids=lambda schema: json.dumps(schema)[:60])
def test_every_text_that_is_allowed_matches_the_schema(schema):
    assert len(check(schema, 40)) > 3


@pytest.mark.parametrize(("schema", "named"), NOT_KEPT, ids=lambda value: json.dumps(value)[:60])
def test_what_would_not_be_kept_to_is_refused_by_name(schema, named):
    with pytest.raises(InvalidRequestError) as caught:
        schema_grammar(json.dumps(schema))
    assert named in str(caught.value)
    assert caught.value.param == "structured"


def test_random_schemas_give_texts_that_match():
    rng = Random(4)
    assert sum(len(check(random_schema(rng), 5)) for _ in range(60)) > 250


def test_times_of_day_have_an_offset_and_exist():
    for text in texts(compiled(schema_grammar('{"type":"string","format":"time"}')), 50):
        hours, minutes, rest = json.loads(text).split(":", 2)
        assert int(hours) < 24
        assert int(minutes) < 60
        assert int(rest[:2]) < 60
        assert "Z" in rest or "+" in rest or "-" in rest


def test_an_additional_property_cannot_take_a_declared_name():
    grammar = compiled(schema_grammar(json.dumps({"properties": {"ab": INT}, "additionalProperties": STR})))
    for text, fits in (('{"ab": 1}', True), ('{"a": "x", "abc": "y"}', True), ('{"ab": "x"}', False)):
        state = grammar.state()
        taken = [state.accept(byte) for byte in text.encode()]
        assert all(taken) == fits


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("required", ["", "a", "c", "b", "ac", "abc"])
def test_every_choice_of_members_that_matches_can_be_written_and_no_other(required, extra):
    schema = {"type": "object", "properties": {name: {"const": 1} for name in "abc"}, "required": list(required)}
    grammar = compiled(schema_grammar(json.dumps({**schema, "additionalProperties": extra})))
    for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "x", "cx", "abcx", "bax", "xy", "acxy"):
        state, text = grammar.state(), json.dumps(dict.fromkeys(names, 1))
        fits = set(required) <= set(names) and (extra or not set(names) & set("xy")) and "ba" not in names
        assert all(map(state.accept, [*text.encode(), 256])) == fits, text


def test_no_blanks_can_be_written_for_ever():
    for text in (schema_grammar("{}"), object_grammar()):
        state = compiled(text).state()
        assert state.accept(ord("{"))
        assert not state.accept(ord(" "))
        assert not state.accept(ord("\n"))


def test_an_object_of_any_kind_is_an_object():
    found = texts(compiled(object_grammar()), 50)
    assert found
    assert all(isinstance(json.loads(text), dict) for text in found)


@pytest.mark.parametrize(
    "text",
    ["{", "nothing", "[" * 100_000, '{"type":"integer","minimum":NaN}', '{"const":1e999}', '{"const":"\\ud800"}'],
    ids=lambda t: t[:20],
)
def test_text_that_is_no_schema_is_refused(text):
    with pytest.raises(InvalidRequestError):
        schema_grammar(text)


def test_depth_and_size_of_schemas_are_limited():
    schema = INT
    for _ in range(32):
        schema = {"items": schema}
    schema_grammar(json.dumps(schema))
    with pytest.raises(InvalidRequestError, match="nested at most 32"):
        schema_grammar(json.dumps({"items": schema}))
    with pytest.raises(InvalidRequestError, match="at most 2000"):
        schema_grammar(json.dumps({"anyOf": [{"const": n} for n in range(2000)]}))


def test_every_enforced_keyword_is_tried_above_and_every_refused_one_is_refused():
    tried = json.dumps(KEPT)
    assert [name for name in ENFORCED if f'"{name}"' not in tried] == []
    for name in REFUSED:
        with pytest.raises(InvalidRequestError, match="cannot be enforced"):
            schema_grammar(json.dumps({name: True}))
    said = dict.fromkeys([*ANNOTATIONS, "x-mine", "strict", "propertyOrdering", "colour"], "text")
    assert constraints(said) == set()
    assert schema_grammar(json.dumps(said)) == schema_grammar("{}")


def test_the_docs_list_every_keyword_as_the_code_has_it():
    rows = [f"| `{name}` | enforced | {note} |" for name, note in ENFORCED.items()]
    rows += [f"| `{name}` | refused | |" for name in REFUSED]
    rows += [f"| `{name}` | annotation | |" for name in ANNOTATIONS]
    lines = [" ".join(line.split()) for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert lines == [" ".join(row.split()) for row in rows]
