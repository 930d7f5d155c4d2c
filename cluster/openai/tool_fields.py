"""The tools that a client offers to the model, and which of them it must or may call.

Source: OpenAI API reference, "tools" and "tool_choice" of chat completions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.openai.field_types import Fields

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise PydanticCustomError("tool_name", "must be 1 to 64 letters, digits, underscores or dashes")
    return value


def _parameters(value: Any) -> Any:
    """An empty schema and one without a type are those of an object, as OpenAI reads them."""
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise PydanticCustomError("tool_parameters", "must be the JSON schema of an object (type 'object')")
    return value


Name = Annotated[str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})]


class Function(Fields):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_parameters)] | None = None
    strict: bool | None = None


class Tool(Fields):
    """One tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = self.function
        told = {} if function.description is None else {"description": function.description}
        parameters = function.parameters or _NO_PARAMETERS
        return {"type": "function", "function": {"name": function.name, **told, "parameters": parameters}}


class NamedTool(Fields):
    """`tool_choice` of one function: it must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _tool_choice(value: Any) -> ToolChoice:
    if value in ("none", "auto", "required"):
        choice: Literal["none", "auto", "required"] = value
        return choice
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return NamedTool(name=function["name"])
    raise PydanticCustomError(
        "tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
    )


def _few_tools(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise PydanticCustomError("tool_count", f"must hold at most {MAX_TOOLS} tools, not {len(value)}")
    return value


Tools = Annotated[list[Tool], BeforeValidator(_few_tools)]
Choice = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
