"""A call of the responses API as the chat that it is. Chats have the one validator; its errors get our names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.openai.call import Call
from cluster.openai.checking import checked_fields, refuse_other_models
from cluster.openai.responses.fields import (
    EXTRAS,
    LOGPROBS,
    REFUSED_RESPONSE,
    FunctionTool,
    NamedFunction,
    ResponseFields,
    TextFormat,
)
from cluster.openai.responses.items import messages_of
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat
from engine.errors import InvalidRequestError

_OURS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


@dataclass(frozen=True, slots=True)
class Asked:
    """An accepted call: what the client sent, and the chat that it comes to."""

    fields: ResponseFields
    call: Call


def parse_response(fields: Mapping[str, Any], model: ServedModel) -> Asked:
    """Check a call; raises `ApiError` or `InvalidRequestError` that names the first wrong field."""
    extras = {name: fields[name] for name in EXTRAS if name in fields}
    own = {name: value for name, value in fields.items() if name not in extras}
    checked = checked_fields(ResponseFields, own, REFUSED_RESPONSE)
    refuse_other_models(checked.model, model)
    _check(checked)
    found = messages_of(checked.input, checked.instructions)
    try:
        call = parse_chat({**_as_chat(checked), "messages": found.messages, **extras}, model)
    except InvalidRequestError as error:
        raise renamed(error, found.origins) from error
    return Asked(checked, replace(call, request_id=f"resp_{secrets.token_hex(16)}"))


def renamed(error: InvalidRequestError, origins: Sequence[str] = ()) -> InvalidRequestError:
    """Return an error of the chat's validator by the names that this API has for its fields.

    origins: what each message was made from.
    """
    if error.param is None:
        return error
    param = our_name(error.param, origins)
    renamed_error = type(error)(str(error).replace(error.param, param), param)
    renamed_error.code = error.code
    return renamed_error


def our_name(param: str, origins: Sequence[str] = ()) -> str:
    """Return this API's name for a field of the chat's; see `renamed`."""
    found = _MESSAGE.match(param)
    if found and int(found[1]) < len(origins):
        return origins[int(found[1])] + param[found.end() :]
    for theirs, ours in _OURS.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return ours + param[len(theirs) :]
    return _FUNCTION.sub(r"\1", param)


def _check(checked: ResponseFields) -> None:
    if checked.stream_options is not None and not checked.stream:
        raise InvalidRequestError("stream_options is allowed only with stream=true", "stream_options")
    if checked.top_logprobs is not None and not checked.include:
        raise InvalidRequestError(f"top_logprobs is allowed only with include=[{LOGPROBS!r}]", "top_logprobs")


def _as_chat(checked: ResponseFields) -> dict[str, Any]:
    return {
        "model": checked.model,
        "stream": checked.stream,
        "max_completion_tokens": checked.max_output_tokens,
        "temperature": checked.temperature,
        "top_p": checked.top_p,
        "tools": None if checked.tools is None else [_tool(one) for one in checked.tools],
        "tool_choice": _choice(checked.tool_choice),
        "parallel_tool_calls": checked.parallel_tool_calls,
        "response_format": _format(checked.text.format if checked.text else None),
        "reasoning_effort": checked.reasoning.effort if checked.reasoning else None,
        "logprobs": True if checked.include else None,
        "top_logprobs": checked.top_logprobs,
    }


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(choice: str | NamedFunction | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    labels = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    if wanted.type == "json_schema":
        for name in ("name", "schema"):
            if name not in labels:
                param = f"text.format.{name}"
                raise InvalidRequestError(f"{param} is missing", param, "missing_parameter")
        return {"type": wanted.type, "json_schema": labels}
    if labels:
        param = f"text.format.{next(iter(labels))}"
        raise InvalidRequestError(f"{param} is allowed only with type 'json_schema'", param)
    return {"type": wanted.type}
