"""What an output must match, in OpenAI's words (`response_format`) and in vLLM's (`structured_outputs`)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.openai.field_types import Fields, Strings
from cluster.openai.tool_fields import Name
from engine.errors import InvalidRequestError
from engine.sampling_params import GrammarKind, StructuredOutput

MAX_CHOICES = 1024


def _schema_text(value: Any) -> str:
    if isinstance(value, dict):
        return _encoded(value)
    if isinstance(value, str):
        return value
    raise PydanticCustomError("json_schema", "must be a JSON schema, as an object or as its text")


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Schema = Annotated[
    str, BeforeValidator(_schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]


class NamedSchema(Fields):
    """A JSON schema with the labels that OpenAI's API gives it; `strict` or not, it is enforced."""

    name: Name
    description: str | None = None
    schema_: Annotated[Schema, WithJsonSchema({"type": "object"})] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: exactly one of its fields."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None


def from_response_format(wanted: ResponseFormat) -> StructuredOutput | None:
    """Return what the output must match, None for plain text; raises `InvalidRequestError` naming the field."""
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            param = "response_format.json_schema"
            raise InvalidRequestError(f"{param} is missing", param, "missing_parameter")
        return _structured("json_schema", wanted.json_schema.schema_, "response_format.json_schema.schema")
    if wanted.json_schema is not None:
        param = "response_format.json_schema"
        raise InvalidRequestError(f"{param} is allowed only with response_format.type 'json_schema'", param)
    return StructuredOutput("json_object") if wanted.type == "json_object" else None


def from_structured_outputs(wanted: StructuredOutputs) -> StructuredOutput:
    """Return what the output must match; raises `InvalidRequestError` naming the field."""
    given = [name for name in StructuredOutputs.model_fields if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequestError(
            "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object",
            "structured_outputs",
        )
    if wanted.json_ is not None:
        return _structured("json_schema", wanted.json_, "structured_outputs.json")
    if wanted.regex is not None:
        return _structured("regex", wanted.regex, "structured_outputs.regex")
    if wanted.grammar is not None:
        return _structured("grammar", wanted.grammar, "structured_outputs.grammar")
    if wanted.choice is not None:
        return _choice(wanted.choice)
    return StructuredOutput("json_object")


def _choice(choices: tuple[str, ...]) -> StructuredOutput:
    param = "structured_outputs.choice"
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequestError(f"{param} must hold 1 to {MAX_CHOICES} strings, none of them empty", param)
    return _structured("choice", _encoded(list(choices)), param)


def _structured(kind: GrammarKind, text: str, param: str) -> StructuredOutput:
    """The engine's own check, told by the client's name of the field."""
    if not text:
        raise InvalidRequestError(f"{param} must not be empty", param)
    try:
        return StructuredOutput(kind, text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param, error.code) from error
