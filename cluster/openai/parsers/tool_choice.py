"""`tool_choice`: which parser reads an answer, and the grammar that forces a call.

Sources: OpenAI API reference, "tool_choice" and "parallel_tool_calls"; a forced list looks as it does in vLLM. JSON
Schema 2020-12, "$ref", and RFC 6901 for moving one schema into another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from msgspec import json

from cluster.openai.parsers.tool_formats import ArgumentsParser, ListedParser, ListParser
from cluster.openai.parsers.tool_parser import CallForm, MakeCallId, ToolParser
from engine.errors import InvalidRequestError
from engine.grammar.texts import CallsOrJson
from engine.sampling_params import StructuredOutput
from engine.text.tokenizer import Tokenizer

MAX_SCHEMA_DEPTH = 64
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})
ToolMode = Literal["auto", "required", "named"]
Schema = Mapping[str, Any]
_PLACE = re.compile(r"json_schema at #/\$defs/tool(\d+)")
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call that may or must be used; a call without tools, or with `none`, has no `ToolUse`.

    tools: name -> JSON schema of its arguments, None = it takes none. Of a named choice only that one.
    parser: of answers in mode auto, from the server's `tool_call_parser`. parallel: whether one answer may hold
    more than one call. bound: whether a grammar lets the model write calls or an answer in JSON, and nothing else.
    make_id: how ids of calls are made, where the server's parser says it.
    """

    mode: ToolMode
    tools: Mapping[str, Schema | None]
    parser: type[ToolParser] | None = None
    parallel: bool = True
    bound: bool = False
    make_id: MakeCallId | None = None

    def structured(self) -> StructuredOutput | None:
        """Return what a forced call must match: None in mode auto, where the model is free to call or not.

        Raises `InvalidRequestError` naming `tools` when the schemas are too large.
        """
        if self.mode == "auto":
            return None
        schema = _named_schema(self.tools) if self.mode == "named" else _required_schema(self.tools, self.parallel)
        try:
            return StructuredOutput("json_schema", json.encode(schema).decode())
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tools: their parameters as one schema: {error}", "tools") from error

    def or_answer(self, answer: StructuredOutput, tokenizer: Tokenizer) -> tuple[ToolUse, StructuredOutput]:
        """Return the use and the output of a model that may call or write `answer`, JSON of a schema or any object.

        Arguments are any objects: of a call that is not forced, the schema only informs. Where the model's own format
        cannot be written (its markers are special tokens, which no grammar has), calls are written as a list.
        Raises `InvalidRequestError` naming `tools` when the names and the schema together are too large.
        """
        parser = self._parser_class()
        if parser.form is None or hides_markers(parser, tokenizer):
            parser = ListedParser
        form = parser.form or CallForm("", "")
        wanted = CallsOrJson(
            tuple((form.begin.replace("NAME", name), form.end) for name in self.tools),
            form.opening,
            form.between,
            form.closing,
            self.parallel,
            answer.text or None,
        )
        try:
            return replace(self, parser=parser, bound=True), StructuredOutput("calls_or_json", wanted.text())
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tools: their names and the schema together: {error}", "tools") from error

    def explained(self, message: str) -> str:
        """Return an error about the schema of `structured` in terms of the tools that it was made of."""
        names = list(self.tools)
        if self.mode == "auto":
            return message
        if self.mode == "named":
            return message.replace("json_schema", f"the parameters of {names[0]}")
        return _PLACE.sub(lambda place: f"the parameters of {names[int(place[1])]} at #", message)

    def new_parser(self, of: str | None = None) -> ToolParser:
        """Return a parser for one choice. of: its name, which decides the ids of calls; None = they are random."""
        chance = None if of is None else Random(of)
        parser = self._parser_class()
        if parser.make_id is self.make_id and not self.bound:
            made = parser(self.tools.keys(), parallel=self.parallel, chance=chance)
        else:
            made = parser(
                self.tools.keys(), parallel=self.parallel, chance=chance, bound=self.bound, make_id=self.make_id
            )
        made.schemas = self.tools
        return made

    def keeps_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the text must be made with special tokens, since the parser looks for some of them."""
        return hides_markers(self._parser_class(), tokenizer)

    def _parser_class(self) -> type[ToolParser]:
        if self.mode == "required":
            return ListParser
        if self.mode == "named":
            return ArgumentsParser
        if self.parser is None:
            raise InvalidRequestError(
                "tool_choice 'auto' needs a parser for this model's calls, and the server was started without "
                "--tool-call-parser; use 'none' or, if its chat template reads tools, 'required' or a named function",
                "tool_choice",
                "unsupported_parameter",
            )
        return self.parser


def tool_use(
    tools: Mapping[str, Schema | None],
    choice: str | None,
    *,
    named: str | None = None,
    parallel: bool = True,
    parser: type[ToolParser] | None = None,
) -> ToolUse | None:
    """Return how tools are used in a call, None when they are not.

    tools: name -> schema of the arguments. choice: `none`, `auto`, `required`; None = auto where there are tools.
    named: the one function that must be called, instead of `choice`. parser: the one of the server's
    `tool_call_parser`.
    Raises `InvalidRequestError` naming `tools` or `tool_choice`.
    """
    make_id = None if parser is None else parser.make_id
    if named is not None:
        if named not in tools:
            raise InvalidRequestError(f"tool_choice names {named[:100]!r}, which is not in tools", "tool_choice")
        return ToolUse("named", {named: tools[named]}, parallel=parallel, make_id=make_id)
    if choice == "required":
        if not tools:
            raise InvalidRequestError("tool_choice 'required' needs tools to choose from", "tool_choice")
        return ToolUse("required", tools, parallel=parallel, make_id=make_id)
    if not tools or choice == "none":
        return None
    use = ToolUse("auto", tools, parser, parallel, make_id=make_id)
    use.new_parser()
    return use


def hides_markers(parser: type[ToolParser], tokenizer: Tokenizer) -> bool:
    """Whether `skip_special_tokens` would take a marker of `parser` out of the text."""
    return any(marker not in _without_special(marker, tokenizer) for marker in parser.markers)


def _without_special(text: str, tokenizer: Tokenizer) -> str:
    # The letters keep tokenizers that add or strip spaces at the ends from changing the marker.
    return tokenizer.decode(tokenizer.encode(f"a{text}a", add_special_tokens=False))


def _named_schema(tools: Mapping[str, Schema | None]) -> Schema:
    (schema,) = tools.values()
    return _object_schema(schema)


def _required_schema(tools: Mapping[str, Schema | None], parallel: bool) -> dict[str, Any]:
    """A list of `{"name", "parameters"}`, the parameters those of the function that is named."""
    calls = []
    parts: dict[str, Schema] = {}
    for number, (name, schema) in enumerate(tools.items()):
        parts[f"tool{number}"] = placed_under(f"#/$defs/tool{number}", _object_schema(schema))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{number}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": parts}


def _object_schema(schema: Schema | None) -> Schema:
    """Arguments are always an object; a schema that says nothing of its type is read as one of an object."""
    if not schema:
        return _NO_PARAMETERS
    return schema if "type" in schema or "$ref" in schema or "anyOf" in schema else {"type": "object", **schema}


def placed_under(pointer: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` for use at `pointer` (such as `#/$defs/x`): what it refers to as `#...` is there from now on.

    Raises `InvalidRequestError` naming `tools` when it is nested too deeply.
    """
    moved: dict[str, Any] = _moved(pointer, schema, 0)
    return moved


def _moved(pointer: str, schema: Any, depth: int) -> Any:
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(f"tools: parameters may be nested {MAX_SCHEMA_DEPTH} deep at most", "tools")
    if isinstance(schema, list):
        return [_moved(pointer, one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _member(pointer, key, value, depth) for key, value in schema.items()}


def _member(pointer: str, key: str, value: Any, depth: int) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return pointer + value[1:]
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, Mapping):
        return {name: _moved(pointer, one, depth + 1) for name, one in value.items()}
    return _moved(pointer, value, depth + 1)
