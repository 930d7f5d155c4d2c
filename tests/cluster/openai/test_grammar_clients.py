"""Schemas as clients' libraries make them: all are taken, and what is written fits the types that they came from."""

import datetime
import enum
import json
import uuid
from typing import Annotated, Any, Literal, Optional

import jsonschema
import openai
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter, UrlConstraints

from cluster.openai.parsers.tool_choice import tool_use
from engine.grammar.json_schema import schema_grammar
from tests.grammar_walk import compiled, texts

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(pattern="^[a-z]+$", max_length=5)]


class Node(BaseModel):
    v: int
    next: Optional["Node"] = Field(None, description="the rest")


class Enums(BaseModel):
    colour: Colour = Field(Colour.RED, description="which", json_schema_extra={"strict": True})
    size: Size
    choice: Literal["a", 1, None] = None
    by_colour: dict[Colour, bool]
    by_word: dict[Literal["x", "y"], bool]


class Optionals(BaseModel):
    a: str | None = Field(None, max_length=3, json_schema_extra={"markdownDescription": "**a**"})
    b: Annotated[int, Field(gt=0, le=10)] | None = Field(None, json_schema_extra={"nullable": True})
    c: Annotated[list[bool], Field(min_length=1, max_length=2)] = [True]
    d: tuple[bool, Size] | None


class Formats(BaseModel):
    link: Annotated[AnyUrl, UrlConstraints(max_length=2083)]
    other: AnyUrl | None
    at: datetime.datetime
    day: datetime.date
    took: datetime.timedelta
    ids: dict[uuid.UUID, bool]
    words: dict[Annotated[str, Field(pattern="^[ab]{1,3}$")], bool]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES = [Enums, Optionals, Formats, Node, Pet, list[Pet], Cat | Dog | None, dict[str, Node | bool]]


def found(schema: dict[str, Any], count: int = 25) -> list[bytes]:
    lines = texts(compiled(schema_grammar(json.dumps(schema))), count)
    assert lines
    return lines


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_is_written_for_a_type_of_pydantics_is_one(kind, mode):
    adapter = TypeAdapter(kind)
    for line in found(adapter.json_schema(mode=mode)):
        adapter.validate_json(line)


def test_a_discriminated_union_always_says_which_it_is():
    """A tag with a default is not required by its schema, and a text without one would fit both options."""
    kinds = {json.loads(line)["kind"] for line in found(TypeAdapter(Pet).json_schema(), 40)}
    assert kinds == {"cat", "dog"}


@pytest.mark.parametrize("kind", [Optionals, Node])
def test_what_the_openai_package_makes_of_a_model_is_kept_to(kind):
    for line in found(to_strict_json_schema(kind)):
        kind.model_validate_json(line)
    function = openai.pydantic_function_tool(kind, name="f")["function"]
    forced = tool_use({"f": function["parameters"]}, "required").structured()
    for line in texts(compiled(schema_grammar(forced.text)), 10):
        kind.model_validate(json.loads(line)[0]["parameters"])


def union(word, **more):
    tag = {"cat": {"const": "cat"}, "dog": {"const": "dog"}}
    objects = [
        {"type": "object", "properties": {"kind": {"type": "string", **each}}, "required": ["kind"], **more}
        for each in tag.values()
    ]
    return {word: objects}


def string(**more):
    return {"type": "string", **more}


DAY = (
    "(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|\\d{4}-(?:(?:0[13578]|1[02])-"
    "(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|(?:02)-(?:0[1-9]|1\\d|2[0-8])))"
)
SAFE = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
# As `z.toJSONSchema` of zod 4.6 and `zodToJsonSchema` of zod-to-json-schema 3.25 write them.
ZOD = {
    "email": string(
        format="email",
        pattern="^(?:[A-Za-z0-9_'+\\-]+\\.)*[A-Za-z0-9_'+\\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
    ),
    "email of zod 4.0": string(
        format="email",
        pattern="^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
    ),
    "uuid": string(
        format="uuid",
        pattern="^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
    ),
    "datetime": string(
        format="date-time", pattern=f"^{DAY}T(?:(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d+)?(?:Z))$"
    ),
    "date": string(format="date", pattern=f"^{DAY}$"),
    "duration": string(
        format="duration",
        pattern="^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
        "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$",
    ),
    "cuid": string(format="cuid", pattern="^[cC][0-9a-z]{6,}$"),
    "base64": string(
        format="base64",
        contentEncoding="base64",
        pattern="^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
    ),
    "regex": string(maxLength=4, pattern="^[a-z]+$"),
    "startsWith": string(format="starts_with", pattern="^a.*"),
    "ip": string(anyOf=[{"format": "ipv4"}, {"format": "ipv6"}]),
    "nullish": {"anyOf": [{"not": {}}, {"type": ["string", "null"], "maxLength": 3}], "$schema": DRAFT_7},
    "union": {"type": ["string", "number"], "maxLength": 3},
    "literal": string(const="x"),
    "null": {"type": "null", "const": None},
    "enum": {"type": "number", "enum": [0, 1]},
    "discriminatedUnion": union("oneOf", additionalProperties=False),
    "discriminatedUnion of zod 3": union("anyOf", additionalProperties=False),
    "intersection of zod 3": {
        "allOf": [
            {"type": "object", "properties": {"a": SAFE}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "tuple": {
        "type": "array",
        "prefixItems": [SAFE, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
        "maxItems": 2,
    },
    "tuple of draft 7": {
        "$schema": DRAFT_7,
        "type": "array",
        "items": [SAFE, {"type": "boolean"}],
        "additionalItems": False,
        "minItems": 2,
        "maxItems": 2,
    },
    "tuple with a rest": {
        "$schema": DRAFT_7,
        "type": "array",
        "items": [{"type": "boolean"}],
        "additionalItems": SAFE,
        "minItems": 1,
    },
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "boolean"},
        "required": ["a", "b"],
    },
    "lazy": {
        "type": "object",
        "properties": {"v": SAFE, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v", "kids"],
        "additionalProperties": False,
    },
    "readonly": {"readOnly": True, "type": "string", "maxLength": 2},
    "file": string(format="binary", contentEncoding="binary", contentMediaType="image/png", maxLength=3),
    "nullable of OpenAPI": {"type": "string", "nullable": True, "maxLength": 3},
}
# Beside these words of their own, what agents' SDKs send is made by pydantic and zod.
AGENTS = {
    "openai-agents, not strict": {
        "type": "object",
        "title": "f_args",
        "required": ["pet"],
        "properties": {
            "pet": {
                **union("oneOf"),
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            },
        },
    },
    "gemini": {
        "type": "object",
        "properties": {"b": SAFE, "a": string(format="enum", enum=["x"], nullable=True)},
        "propertyOrdering": ["a", "b"],
        "strict": True,
    },
    "mcp": {
        "$schema": DRAFT_7,
        "type": "object",
        "properties": {"path": string(markdownDescription="a *path*", format="path", maxLength=3)},
        "annotations": {"readOnlyHint": True},
        "inputExamples": [{"path": "a"}],
    },
}


@pytest.mark.parametrize("schema", [*ZOD.values(), *AGENTS.values()], ids=[*ZOD, *AGENTS])
def test_what_zod_and_agents_sdks_write_is_kept_to(schema):
    dialect = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = dialect(schema, format_checker=jsonschema.FormatChecker())
    for line in found(schema, 15):
        validator.validate(json.loads(line))
