"""What clients may send to `POST /v1/responses`.

Source: OpenAI API reference, "create a model response".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from cluster.openai.fields import MAX_MESSAGES, Fields, Label, Labels, at_most, note
from cluster.openai.refusals import EXTENSIONS, OPENAI_CHAT, Refusal
from cluster.openai.request_fields import MAX_TOOLS, ChatFields, Name, ReasoningEffort

_MAX = 2**31 - 1
LOGPROBS = "message.output_text.logprobs"
# Taken as chats take them, and checked there.
EXTRAS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "request_id",
)


def _text_or_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("input_type", "must be a string or a list of items")
    return value


def _tool_type(value: Any) -> Any:
    if value != "function":
        raise PydanticCustomError(
            "tool_type",
            "must be 'function', the one kind that there is, not {kind}: this server runs no tools of its own "
            "(web_search, file_search, code_interpreter, computer, image_generation, mcp, shell); send a function "
            "and answer its calls",
            {"kind": repr(value)[:100]},
        )
    return value


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Annotated[str, BeforeValidator(_tool_type), WithJsonSchema({"const": "function"})]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Fields):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and set(value) == {"type", "name"} and value["type"] == "function":
        return NamedFunction.model_validate(value)
    raise PydanticCustomError(
        "tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}"
    )


Input = Annotated[
    Any,
    BeforeValidator(_text_or_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}),
]
ResponseToolChoice = Annotated[
    Any,
    BeforeValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, NamedFunction.model_json_schema()]}),
]


Verbosity = Literal["low", "medium", "high"]
Summary = Literal["auto", "concise", "detailed"]
# What an answer may hold beside its text. The first is sent; the others are of tools and inputs that there are not,
# and of thoughts, which are sent as they are.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(Fields):
    """What the text must be; name and schema only with `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Fields):
    """How much the model is to think; thoughts are returned as they are, so that a summary has no use."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseStreamOptions(Fields):
    """Nothing is added to events, and the last one tells the usage: aiperf asks for it as it does of chats."""

    include_obfuscation: Literal[False] = False
    include_usage: Literal[True] = True


class ResponseFields(Fields):
    """`POST /v1/responses`."""

    model: str = Field(description="a name of a served model; GET /v1/models lists them")
    input: Input = Field(
        description=f"a text, or up to {MAX_MESSAGES} items: messages with text, function_call, function_call_output"
    )
    instructions: str | None = note("a system message before the input")
    max_output_tokens: int | None = note("at most that many tokens of output, thinking included", 1, _MAX)
    temperature: float | None = note("0 is greedy; up to 100", 0, 100)
    top_p: float | None = note("above 0, at most 1", 0, 1)
    text: TextOptions | None = note("format of an answer that is no call: text, json_object, json_schema (enforced)")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools")] | None = note(
        "functions, at most 1024, where the model's chat template reads tools; their schemas bind calls that are "
        "forced (strict or not), and only inform those that are not"
    )
    tool_choice: ResponseToolChoice | None = note(
        "none (tools are kept from the model), auto, required, or one function"
    )
    parallel_tool_calls: bool | None = note("false: at most one call; default true")
    reasoning: ReasoningOptions | None = note("effort, where the model's chat template reads it")
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = note(
        "message.output_text.logprobs: log-probabilities of the text"
    )
    top_logprobs: int | None = note("0 to 20, more with --max-logprobs; only with include", -1, _MAX)
    stream: bool = note("server-sent events", default=False)
    stream_options: ResponseStreamOptions | None = note("only with stream, whose last event tells the usage anyway")
    background: bool | None = note(
        "true: the answer goes on without its client, to be fetched at /v1/responses/{id}; needs --response-retention"
    )
    store: bool | None = note(
        "true: the answer can be fetched for --response-retention seconds; default false, with background true"
    )
    previous_response_id: str | None = note(
        "a response that is kept and has ended: its input and output come before the input; its instructions do not"
    )
    truncation: Literal["disabled"] | None = note("only disabled: what is too long is refused")
    metadata: Labels | None = note("labels: echoed, not stored")
    user: Label | None = note("a label: echoed, not stored")
    safety_identifier: Label | None = note("a label: echoed, not stored")
    prompt_cache_key: Label | None = note("a label: requests go to the replica that has most of their prefix anyway")


class ResponseQuery(Fields):
    """The query of `GET /v1/responses/{response_id}`."""

    stream: bool | None = note("true: the events of the response, those that are still to come as they come")
    starting_after: int | None = note("only with stream: the sequence_number of the last event that came", 0, _MAX)


class ItemsQuery(Fields):
    """The query of `GET /v1/responses/{response_id}/input_items`."""

    after: str | None = note("the id of the last item of the page before")
    limit: int | None = note("1 to 100 items; default 20", 1, 100)
    order: Literal["asc", "desc"] = note("asc: as they were sent, or desc: the last first", default="desc")


REFUSED_ITEMS_QUERY: Mapping[str, Refusal] = {"include": Refusal((), "items are listed with all that they hold")}
REFUSED_QUERY: Mapping[str, Refusal] = {
    "include": Refusal((), "send include with the request that begins the response"),
    "include_obfuscation": Refusal(("false",), "nothing is added to events"),
}


# All fields together, for the API document.
ResponseRequest: type[ResponseFields] = create_model(
    "ResponseRequest",
    __base__=ResponseFields,
    **{name: (field.annotation, field) for name, field in ChatFields.model_fields.items() if name in EXTRAS},  # type: ignore[call-overload]  # pydantic types these keywords one by one
)
_ELSEWHERE = "use text.format, or chat completions, which have structured_outputs"
_STATELESS = "conversations are not kept here: send the whole conversation as input"
REFUSED_RESPONSE: Mapping[str, Refusal] = {
    **{name: one for name, one in OPENAI_CHAT.items() if name != "store"},
    **{
        name: Refusal(one.neutral, _ELSEWHERE) if "structured_outputs" in one.instead else one
        for name, one in EXTENSIONS.items()
    },
    "conversation": Refusal((), _STATELESS),
    "prompt": Refusal((), "stored prompts do not exist here; send input and instructions"),
    "max_tool_calls": Refusal((), "it bounds tools that the server runs, and there are none", (int,)),
    "access_programs": Refusal(),
    "context_management": Refusal(),
    "image": Refusal((), "this model reads and writes text only"),
    "moderation": Refusal(),
    "messages": Refusal((), "use input"),
    "max_tokens": Refusal((), "use max_output_tokens"),
    "max_completion_tokens": Refusal((), "use max_output_tokens"),
    "response_format": Refusal((), "use text.format"),
    "json_schema": Refusal((), "use text.format"),
    "structured_outputs": Refusal((), _ELSEWHERE),
    "regex": Refusal((), _ELSEWHERE),
    "ebnf": Refusal((), _ELSEWHERE),
    "thinking_token_budget": Refusal((), "use chat completions, which have it"),
    "return_tokens_as_token_ids": Refusal((False,), "use chat completions, which have return_token_ids"),
    "reasoning_effort": Refusal((), "use reasoning.effort"),
    "n": Refusal((1,), "a response has one answer"),
}
