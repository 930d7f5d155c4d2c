"""What clients may send to completions and chats. Types are checked here, ranges by `SamplingParams`, meaning later.

Each field's note is what the API document and the table of fields (docs/reference/api.md) say of it.
Source: OpenAI API reference (completions, chat completions, "tools" and "tool_choice"); the extra fields are those of
vLLM's server.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.openai.fields import (
    Biases,
    Fields,
    Label,
    Labels,
    Messages,
    Prompts,
    SomeTokenIds,
    Strings,
    TokenIds,
    at_most,
    note,
)
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_N, GrammarKind, StructuredOutput

MAX_TOOLS = 1024  # OpenAI has 128; an agent may have the tools of many MCP servers
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # OpenAI has 64; agents name tools of MCP servers by both
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MAX_CHOICES = 1024
_MAX = 2**31 - 1
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise PydanticCustomError("tool_name", "must be 1 to 128 letters, digits, underscores or dashes")
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


Tools = Annotated[list[Tool], at_most(MAX_TOOLS, "tools")]
AnyToolChoice = Annotated[
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
            raise InvalidRequestError(f"{param} is missing", param, "missing_required_parameter")
        return structured_output("json_schema", wanted.json_schema.schema_, "response_format.json_schema.schema")
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
        return structured_output("json_schema", wanted.json_, "structured_outputs.json")
    if wanted.regex is not None:
        return structured_output("regex", wanted.regex, "structured_outputs.regex")
    if wanted.grammar is not None:
        return structured_output("grammar", wanted.grammar, "structured_outputs.grammar")
    if wanted.choice is not None:
        return _choice(wanted.choice)
    return StructuredOutput("json_object")


def _choice(choices: tuple[str, ...]) -> StructuredOutput:
    param = "structured_outputs.choice"
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequestError(f"{param} must hold 1 to {MAX_CHOICES} strings, none of them empty", param)
    return structured_output("choice", _encoded(list(choices)), param)


def structured_output(kind: GrammarKind, text: str, param: str) -> StructuredOutput:
    """Return what the output must match; raises `InvalidRequestError` with the client's name of the field."""
    if not text:
        raise InvalidRequestError(f"{param} must not be empty", param)
    try:
        return StructuredOutput(kind, text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param, error.code) from error


class StreamOptions(Fields):
    """How a stream reports usage."""

    include_usage: bool = note("one more chunk before [DONE], with empty choices and the usage", default=False)
    continuous_usage_stats: bool = note("usage so far in every chunk; only with include_usage", default=False)
    include_obfuscation: Literal[False] = note("only false: nothing is added to chunks", default=False)


class ChatTemplateKwargs(Fields):
    """Variables of the model's chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class GenerationFields(Fields):
    """What completions and chat completions share. A field that was not sent keeps `SamplingParams`' default."""

    model: str = Field(description="a name of a served model; GET /v1/models lists them")
    n: int | None = note(f"1 to {MAX_N} choices", 1, MAX_N)
    temperature: float | None = note("0 is greedy; up to 100", 0, 100)
    top_p: float | None = note("above 0, at most 1", 0, 1)
    top_k: int | None = note("0 or -1 is off", -1, _MAX)
    min_p: float | None = note("0 is off", 0, 1)
    repetition_penalty: float | None = note("1 is off; 0.01 to 100", 0.01, 100)
    presence_penalty: float | None = note("-2 to 2", -2, 2)
    frequency_penalty: float | None = note("-2 to 2", -2, 2)
    seed: int | None = note("the same request and seed give the same tokens, whatever else runs", -(2**63), 2**63 - 1)
    stop: Strings | None = note("at most 16 strings of 256 bytes")
    stop_token_ids: TokenIds | None = note("at most 1024 ids")
    logit_bias: Biases | None = note("at most 1024 token ids, -100 to 100 each; -100 is a bias like any other")
    allowed_token_ids: SomeTokenIds | None = note("no other token is drawn; at most 4096 ids")
    bad_words: Strings | None = note("texts that are never completed; at most 128 of 256 bytes")
    min_tokens: int | None = note("no end and no stop before that many tokens", 0, _MAX)
    max_tokens: int | None = note("at most that many tokens of output", 0, _MAX)
    ignore_eos: bool | None = note("the end-of-sequence token does not end the output")
    skip_special_tokens: bool | None = note("false shows special tokens in the text; default true")
    include_stop_str_in_output: bool | None = note("the stop string that ended the output is shown")
    prompt_logprobs: int | None = note("0 to 20 best of each prompt token; not with stream", 0, 20)
    structured_outputs: StructuredOutputs | None = note(
        "exactly one of json, regex, choice, grammar (EBNF), json_object; needs the extra 'structured'"
    )
    regex: str | None = note("as structured_outputs={'regex': ...}")
    ebnf: str | None = note("as structured_outputs={'grammar': ...}")
    truncate_prompt_tokens: int | None = note("keep k tokens of the prompt; -1: as many as fit", -1, _MAX)
    truncation_side: Literal["left", "right"] | None = note(
        "left: the beginning is left out (the default); right: the end"
    )
    add_special_tokens: bool | None = note("whether the tokenizer adds its own (BOS); default true, in chats false")
    stream: bool = note("server-sent events", default=False)
    stream_options: StreamOptions | None = note("include_usage, continuous_usage_stats; only with stream")
    user: Label | None = note("a label: changes nothing, is not stored")
    request_id: str | None = note("echoed in the answer and, without such a header, as x-request-id; never a key")
    priority: int = note(
        "smaller runs earlier; where the server does not schedule by priority, only 0", -_MAX, _MAX, default=0
    )
    cache_salt: str | None = note("only requests with the same salt share cached prefixes; at most 256 bytes")
    logprob_token_ids: SomeTokenIds | None = note(
        "with logprobs: these tokens, at most 128, are told in the place of the best ones"
    )
    return_token_ids: bool = note("token_ids of choices and prompt_token_ids", default=False)
    return_tokens_as_token_ids: bool = note("tokens of logprobs are written as token_id:ID", default=False)


class CompletionFields(GenerationFields):
    """`POST /v1/completions`."""

    prompt: Prompts = Field(description="a text, token ids, or up to 128 of either")
    logprobs: int | None = note(
        "0 to 20 best of each token, more with --max-logprobs; -1: all of the vocabulary, where that is allowed",
        -1,
        _MAX,
    )
    echo: bool = note("the prompt comes before the output, with logprobs its own; max_tokens may be 0", default=False)


class ChatFields(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(description="roles system, developer, user, assistant, tool; text content only")
    logprobs: bool = note("log-probabilities of the output tokens", default=False)
    top_logprobs: int | None = note("as logprobs of completions; only with logprobs", -1, _MAX)
    max_completion_tokens: int | None = note("at most that many tokens of output", 1, _MAX)
    response_format: ResponseFormat | None = note(
        "text, json_object, json_schema (enforced, strict or not) of an answer that is no call; json needs the extra "
        "'structured'"
    )
    reasoning_effort: ReasoningEffort | None = note("where the model's chat template reads it, else a hint")
    tools: Tools | None = note(
        "functions, at most 1024, where the model's chat template reads tools; their schemas bind calls that are "
        "forced (strict or not), and only inform those that are not"
    )
    tool_choice: AnyToolChoice | None = note("none (tools are kept from the model), auto, required, or one function")
    parallel_tool_calls: bool | None = note("false: at most one call; default true")
    metadata: Labels | None = note("labels: change nothing, are not stored")
    safety_identifier: Label | None = note("a label: changes nothing, is not stored")
    prompt_cache_key: Label | None = note("a label: requests go to the replica that has most of their prefix anyway")
    chat_template_kwargs: ChatTemplateKwargs | None = note(
        "enable_thinking and thinking, where the model's chat template reads them, else hints"
    )
    thinking_token_budget: int | None = note(
        "tokens after which thinking is ended; needs --reasoning-parser, n 1 and no log-probabilities; a hint where "
        "the output must match something",
        1,
        _MAX,
    )
    include_reasoning: bool | None = note("false: thoughts are left out where the server parses them")
    separate_reasoning: bool | None = note("false: thoughts stay in the content, with their tags")
    add_generation_prompt: bool | None = note("false leaves the head of the assistant's turn out")
    continue_final_message: bool = note("the output goes on with the last message", default=False)


class TokenizeFields(Fields):
    """`POST /tokenize`: a text or a chat to tokens."""

    model: str | None = note("a name of a served model; may be left out where there is only one")
    prompt: str | None = note("a text; or messages")
    messages: Messages | None = Field(default=None, description="a chat, as the template writes it; or prompt")
    tools: Tools | None = note("as in a chat")
    tool_choice: None = None
    reasoning_effort: ReasoningEffort | None = note("as in a chat")
    chat_template_kwargs: ChatTemplateKwargs | None = note("as in a chat")
    add_generation_prompt: bool | None = note("as in a chat")
    continue_final_message: bool = note("as in a chat", default=False)
    add_special_tokens: bool | None = note("whether the tokenizer adds its own (BOS); default true, in chats false")
    return_token_strs: bool = note("token_strs: the text of each token", default=False)


class DetokenizeFields(Fields):
    """`POST /detokenize`: tokens to text, special tokens included."""

    model: str | None = note("a name of a served model; may be left out where there is only one")
    tokens: TokenIds = Field(description="token ids, as many as the model's context holds")
