"""What clients may send to `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Source: Anthropic API reference, "create a message" and "count tokens in a message".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from cluster.openai.fields import MAX_MESSAGES, Fields, Label, Strings, at_most, note
from cluster.openai.refusals import Refusal
from cluster.openai.request_fields import MAX_TOOLS, ChatFields, Name

_MAX = 2**31 - 1
_MOST_SHOWN = 100  # characters of what a client sent
# Taken as chats take them, and checked there.
EXTRAS = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "priority",
    "cache_salt",
    "request_id",
)
# Of tools and blocks: prefixes are cached automatically, and a server without tools has nobody else to call them.
_TOOL_HINTS = ("cache_control", "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")


def _tool_kind(value: Any) -> Any:
    if value != "custom":
        raise PydanticCustomError(
            "tool_kind",
            "must be 'custom', not {kind}: this server runs no tools of its own; send a tool with name, description "
            "and input_schema, and answer its calls",
            {"kind": repr(value)[:_MOST_SHOWN]},
        )
    return value


def _text_or_blocks(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("system_type", "must be a string or a list of text blocks")
    return value


def _schema_of_object(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise PydanticCustomError("input_schema", "must be the JSON schema of an object (type 'object')")
    return value


class MessageTool(Fields):
    """A tool that the client runs; `input_schema` is the JSON schema of its input."""

    hints: ClassVar[Mapping[str, str]] = {name: f"tools[].{name}" for name in _TOOL_HINTS}
    type: Annotated[str, BeforeValidator(_tool_kind), WithJsonSchema({"const": "custom"})] = "custom"
    name: Name
    description: str | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(_schema_of_object)]
    strict: bool | None = None


class MessageToolChoice(Fields):
    """How tools are used. name: of the tool, with type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields):
    """Whether the model is to think. display: omitted and updates = blocks of thinking come without their text.

    With updates, which is in Anthropic's beta, an agent shows what the model says between its calls instead.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Fields):
    """What the text must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(Fields):
    """Labels."""

    user_id: Label | None = None


_BLOCK = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_use"},
                "id": {"type": "string"},
                "name": {"type": "string"},
                "input": {"type": "object"},
            },
            "required": ["type", "id", "name", "input"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_result"},
                "tool_use_id": {"type": "string"},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
                "is_error": {"type": "boolean"},
            },
            "required": ["type", "tool_use_id"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
            "required": ["type", "thinking"],
        },
    ]
}
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    "required": ["role", "content"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK["anyOf"][0]}]}


class CountTokensFields(Fields):
    """`POST /v1/messages/count_tokens`: what makes a prompt."""

    model: str = Field(description="a name of a served model; GET /v1/models lists them")
    messages: Annotated[
        list[Any],
        at_most(MAX_MESSAGES, "messages"),
        WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
    ] = Field(
        description="roles user, assistant, system; blocks text, tool_use, tool_result, thinking. A last message of "
        "the assistant is gone on with"
    )
    system: Annotated[Any, BeforeValidator(_text_or_blocks), WithJsonSchema(_TEXTS)] = note(
        "a text, or blocks of text; a block x-anthropic-billing-header is left out"
    )
    tools: Annotated[list[MessageTool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools")] | None = note(
        "type custom, at most 1024, where the model's chat template reads tools; their schemas bind calls that are "
        "forced (strict or not), and only inform those that are not"
    )
    tool_choice: MessageToolChoice | None = note("auto, any, tool or none, with disable_parallel_tool_use")
    thinking: ThinkingConfig | None = note(
        "enabled, disabled, where the model's chat template reads it; adaptive: as the model does; budget_tokens "
        "needs --reasoning-parser, else it is a hint; display omitted or updates leaves the text out"
    )
    output_config: OutputConfig | None = note(
        "effort, where the model's chat template reads it; format json_schema (enforced) of an answer that is no call"
    )


class MessagesFields(CountTokensFields):
    """`POST /v1/messages`."""

    max_tokens: int = Field(
        description="at most that many tokens of output, thinking included; fewer where the context ends before",
        json_schema_extra={"minimum": 1, "maximum": _MAX},
    )
    stream: bool = note("server-sent events", default=False)
    stop_sequences: Strings | None = note("at most 16 strings of 256 bytes")
    temperature: float | None = note("0 is greedy; up to 100", 0, 100)
    top_p: float | None = note("above 0, at most 1", 0, 1)
    top_k: int | None = note("0 or -1 is off", -1, _MAX)
    metadata: MessageMetadata | None = note("user_id, a label: changes nothing, is not stored")


# All fields together, for the API document.
MessagesRequest: type[MessagesFields] = create_model(
    "MessagesRequest",
    __base__=MessagesFields,
    **{name: (field.annotation, field) for name, field in ChatFields.model_fields.items() if name in EXTRAS},  # type: ignore[call-overload]  # pydantic types these keywords one by one
)
_NO_CONTAINER = "this server runs no tools of its own"
REFUSED_COUNT: Mapping[str, Refusal] = {
    "cache_control": Refusal((), "prefixes are cached automatically", (dict,)),
    "context_management": Refusal(({},), "send the conversation as it is to be read", (dict,)),
    "mcp_servers": Refusal(([],), _NO_CONTAINER),
    "output_format": Refusal((), "use output_config.format"),
    "speed": Refusal(("standard",), "there is one speed", (str,)),
}
REFUSED_MESSAGES: Mapping[str, Refusal] = {
    **REFUSED_COUNT,
    "container": Refusal((), _NO_CONTAINER),
    "diagnostics": Refusal((), "leave it out", (dict,)),
    "inference_geo": Refusal((), "leave it out", (str,)),
    "service_tier": Refusal(("auto", "standard_only"), "use priority", (str,)),
    "stop": Refusal((), "use stop_sequences"),
    "max_completion_tokens": Refusal((), "use max_tokens"),
    "max_tokens_to_sample": Refusal((), "use max_tokens"),
    "n": Refusal((1,), "a message has one answer"),
    "response_format": Refusal((), "use output_config.format"),
    "reasoning_effort": Refusal((), "use output_config.effort"),
    "stream_options": Refusal(({}, {"include_usage": True}), "streams tell the usage anyway"),
    "chat_template_kwargs": Refusal((), "use thinking"),
    "structured_outputs": Refusal((), "use output_config.format, or chat completions, which have it"),
}
