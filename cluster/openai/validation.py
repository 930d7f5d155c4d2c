"""The one validator of every ingress: a client's fields in, an accepted call out, or an error that names the field.

Nothing here waits, and nothing here knows HTTP: gRPC and batch use the same functions.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from cluster.errors import ApiError
from cluster.openai.schema import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    ChatFields,
    CompletionFields,
    GenerationFields,
    Prompt,
)
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams

_SAMPLING = [
    field.name for field in dataclasses.fields(SamplingParams) if field.name in GenerationFields.model_fields
]
_MAX_PRIORITY = 2**31 - 1
_MAX_SALT_BYTES = 256
T = TypeVar("T", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat and how its template is to be filled in."""

    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One accepted call of a client: what to generate from, and how to answer.

    request_id: made by the server. seed: the client's, or a random one. prompts: of a completion; conversation: of
    a chat. Choices of the answer are numbered prompt by prompt: `prompt index x params.n + choice`.
    """

    request_id: str
    params: SamplingParams
    seed: int
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: bytes = b""


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; raises `ApiError` (400) when the body is none."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise ApiError("invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_json", "the request body must be a JSON object")
    return fields


def parse_completion(fields: Mapping[str, Any], model: ServedModel) -> Call:
    """Check a completion; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    checked = _checked(CompletionFields, fields, UNSUPPORTED_COMPLETION, model)
    params = _sampling_params(checked, logprobs=checked.logprobs)
    return Call(prompts=tuple(checked.prompt), **_common("cmpl-", checked, params))


def parse_chat(fields: Mapping[str, Any], model: ServedModel) -> Call:
    """Check a chat completion; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    checked = _checked(ChatFields, fields, UNSUPPORTED_CHAT, model)
    if not checked.messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    params = _sampling_params(checked, logprobs=_chat_logprobs(checked), max_tokens=_chat_max_tokens(checked))
    return Call(conversation=_conversation(checked, model), **_common("chatcmpl-", checked, params))


def _checked(
    schema: type[T], fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], model: ServedModel
) -> T:
    """Check names, then types, then the model. A field that is null counts as not sent."""
    given = {}
    for name, value in fields.items():
        if name not in schema.model_fields:
            _refuse_unless_neutral(name, value, unsupported, schema)
        elif value is not None:
            given[name] = value
    try:
        checked = schema.model_validate(given)
    except ValidationError as error:
        raise _type_error(error, schema) from None
    if checked.model != model.model_id:
        raise ApiError(
            "model_not_found",
            f"the model {checked.model[:100]!r} does not exist here; this server has {model.model_id!r}",
            param="model",
        )
    return checked


def _refuse_unless_neutral(
    name: str, value: Any, unsupported: Mapping[str, tuple[Any, ...]], schema: type[GenerationFields]
) -> None:
    if name in unsupported:
        if value is None or any(type(value) is type(neutral) and value == neutral for neutral in unsupported[name]):
            return
        raise InvalidRequestError(
            f"{name} is not supported by this server; leave it out", name, "unsupported_parameter"
        )
    near = difflib.get_close_matches(name[:100], schema.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidRequestError(f"unknown field {name[:100]}{hint}", name[:100], "unknown_parameter")


def _type_error(error: ValidationError, schema: type[GenerationFields]) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is missing", param, "missing_parameter")
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param} is not supported; leave it out", param, "unknown_parameter")
    message = first["msg"].removeprefix("Input should be ")
    must = "" if message.startswith("must ") else "must be "  # our own validators write whole phrases
    return InvalidRequestError(f"{param} {must}{message}", param, "invalid_type")


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as clients write it: `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path[:200]


def _sampling_params(checked: GenerationFields, **more: Any) -> SamplingParams:
    given = {name: value for name in _SAMPLING if (value := getattr(checked, name)) is not None}
    return SamplingParams(**{**given, **more})


def _common(prefix: str, checked: GenerationFields, params: SamplingParams) -> dict[str, Any]:
    if checked.stream_options is not None and not checked.stream:
        raise InvalidRequestError("stream_options is allowed only with stream=true", "stream_options")
    if not -_MAX_PRIORITY <= checked.priority <= _MAX_PRIORITY:
        raise InvalidRequestError(f"priority must be between -{_MAX_PRIORITY} and {_MAX_PRIORITY}", "priority")
    salt = (checked.cache_salt or "").encode()
    if len(salt) > _MAX_SALT_BYTES:
        raise InvalidRequestError(f"cache_salt may have at most {_MAX_SALT_BYTES} bytes", "cache_salt")
    return {
        "request_id": prefix + secrets.token_hex(16),
        "params": params,
        "seed": secrets.randbits(63) if params.seed is None else params.seed,
        "stream": checked.stream,
        "include_usage": checked.stream_options is not None and checked.stream_options.include_usage,
        "return_token_ids": checked.return_token_ids,
        "priority": checked.priority,
        "cache_salt": salt,
    }


def _chat_logprobs(checked: ChatFields) -> int | None:
    if checked.top_logprobs is not None and not checked.logprobs:
        raise InvalidRequestError("top_logprobs is allowed only with logprobs=true", "top_logprobs")
    if checked.top_logprobs is not None and not 0 <= checked.top_logprobs <= 20:
        raise InvalidRequestError(
            f"top_logprobs must be between 0 and 20, not {checked.top_logprobs}", "top_logprobs"
        )
    return (checked.top_logprobs or 0) if checked.logprobs else None


def _chat_max_tokens(checked: ChatFields) -> int | None:
    """`max_completion_tokens` is today's name; without either, a chat may fill the context."""
    old, new = checked.max_tokens, checked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are one setting: send only max_completion_tokens", "max_tokens"
        )
    if new is not None and new < 1:
        raise InvalidRequestError(f"max_completion_tokens must be at least 1, not {new}", "max_completion_tokens")
    return old if new is None else new


def _conversation(checked: ChatFields, model: ServedModel) -> Conversation:
    if checked.continue_final_message and checked.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt must be false with continue_final_message=true", "add_generation_prompt"
        )
    kwargs = checked.chat_template_kwargs
    options = kwargs.model_dump(exclude_none=True) if kwargs else {}
    template = model.tokenizer.chat_template or ""
    for name in options:
        _refuse_unused(name, f"chat_template_kwargs.{name}", template)
    messages = []
    for i, message in enumerate(checked.messages):
        one = {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        if message.name is not None:
            _refuse_unused("name", f"messages[{i}].name", template)
            one["name"] = message.name
        messages.append(one)
    add = not checked.continue_final_message and checked.add_generation_prompt is not False
    return Conversation(tuple(messages), add, checked.continue_final_message, options)


def _refuse_unused(variable: str, param: str, template: str) -> None:
    if not re.search(rf"\b{variable}\b", template):
        raise InvalidRequestError(
            f"{param} is not used by this model's chat template; leave it out", param, "unsupported_parameter"
        )
