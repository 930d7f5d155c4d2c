"""What a log says of a wanted output: its form, none of the client's words."""

import json

import pytest

from engine.grammar.texts import MOST, shape
from engine.sampling_params import StructuredOutput

SCHEMA = {
    "title": "Secret",
    "type": "object",
    "properties": {"secret": {"type": "string", "maxLength": 200}, "other": {"$ref": "#/$defs/secret"}},
    "required": ["secret"],
    "$defs": {"secret": {"anyOf": [{"enum": ["secret", "b"]}, {"type": ["integer", "null"], "minimum": 3}, True]}},
    "secretWord": {"secret": 1},
    "additionalProperties": False,
}


def test_a_schema_is_told_by_its_keywords_and_numbers():
    told = shape(StructuredOutput("json_schema", json.dumps(SCHEMA)))
    kind, _, form = told.partition(" ")
    assert kind == "json_schema"
    assert json.loads(form) == {
        "type": "object",
        "properties": {"#0": {"type": "string", "maxLength": 200}, "#1": {"$ref": 14}},
        "required": 1,
        "$defs": {"#0": {"anyOf": [{"enum": 2}, {"type": ["integer", "null"], "minimum": 3}, True]}},
        "?": 1,
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (StructuredOutput("regex", "secret[^é]{130,}"), "regex xxxxxx[^x]{130,}"),
        (StructuredOutput("grammar", 'root ::= "hi"\n'), 'grammar xxxx ::= "xx"'),
        (StructuredOutput("json_object"), "json_object"),
        (StructuredOutput("json_schema", "secret"), "json_schema 6 characters"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_texts_are_told_by_their_signs_and_counts(wanted, told):
    assert shape(wanted) == told


def test_however_long_it_is_the_line_stays_short():
    schema = {"properties": {str(number): {"maxLength": number} for number in range(900)}}
    assert len(shape(StructuredOutput("json_schema", json.dumps(schema)))) == MOST
