"""What clients may send. Types are checked here, ranges by `SamplingParams`, meaning by `validation`.

Source: OpenAI API reference (completions, chat completions); the extra fields are those of vLLM's server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _starts_with_id(value: list[Any]) -> bool:
    return bool(value) and type(value[0]) is int


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and _starts_with_id(value)) else value
    if not isinstance(prompts, list) or not all(isinstance(one, str) or _is_ids(one) for one in prompts):
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise PydanticCustomError("prompt_count", f"must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    return prompts


def _few_messages(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise PydanticCustomError("message_count", f"must hold at most {MAX_MESSAGES} messages, not {len(value)}")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise PydanticCustomError("string_list", "must be a string or a list of strings")
    return tuple(strings)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value != [] and not _is_ids(value):
        raise PydanticCustomError("id_list", "must be a list of token ids")
    return tuple(value)


def _text(value: Any) -> str:
    """Content is a string or a list of text parts; the parts become one string, a line each."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of parts of type 'text'")
    return "\n".join([_part_text(part) for part in value])


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise PydanticCustomError("content_part", "may hold parts of type 'text' only: this model reads no other input")


class Fields(BaseModel):
    """Base of all request objects: exact types, nothing unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Fields):
    """`include_usage`: one more chunk at the end, without choices, with the usage of the whole request."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ResponseFormat(Fields):
    """Plain text is the only format so far."""

    type: Literal["text"]


class Message(Fields):
    """One message of a conversation; `developer` is today's name of `system`.

    Clients send answers back as they came, so fields that are null or empty count as not sent.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {name: value for name, value in message.items() if value not in (None, [], {})}


class ChatTemplateKwargs(Fields):
    """Variables of the model's chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class GenerationFields(Fields):
    """What completions and chat completions share. A field that was not sent keeps `SamplingParams`' default."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_strings)] | None = None
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_token_ids)] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False


class CompletionFields(GenerationFields):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: int | None = None


class ChatFields(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(_few_messages)]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


# Fields of the API that this server does not have, with the values that ask for nothing and so are let through.
_UNSUPPORTED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_ANYWHERE,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED_ANYWHERE,
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
