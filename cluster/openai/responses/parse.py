"""A call of the responses API as the chat that it is. Chats have the one validator; its errors get our names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.openai.call import Call
from cluster.openai.checking import checked_fields, refuse_other_models
from cluster.openai.hints import Hints
from cluster.openai.responses.fields import (
    EXTRAS,
    LOGPROBS,
    REFUSED_RESPONSE,
    FunctionTool,
    NamedFunction,
    ResponseFields,
    TextFormat,
)
from cluster.openai.responses.items import Origin, messages_of
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
    hints = Hints(model.strict_fields)
    checked = checked_fields(ResponseFields, own, REFUSED_RESPONSE, hints)
    refuse_other_models(checked.model, model)
    _check(checked, hints)
    found = messages_of(checked.input, checked.instructions, hints)
    try:
        call = parse_chat({**_as_chat(checked), "messages": found.messages, **extras}, model)
    except InvalidRequestError as error:
        raise renamed(error, found.origins) from error
    for name in call.ignored:
        hints.ignore(our_name(name))
    return Asked(checked, replace(call, request_id=f"resp_{secrets.token_hex(16)}", ignored=hints.names))


def renamed(error: InvalidRequestError, origins: Sequence[Origin] = ()) -> InvalidRequestError:
    """Return an error of the chat's validator by the names that this API has for its fields.

    origins: what each message was made from.
    """
    if error.param is None:
        return error
    param = our_name(error.param, origins)
    renamed_error = type(error)(str(error).replace(error.param, param), param)
    renamed_error.code = error.code
    return renamed_error


def our_name(param: str, origins: Sequence[Origin] = ()) -> str:
    """Return this API's name for a field of the chat's; see `renamed`."""
    found = _MESSAGE.match(param)
    if found and int(found[1]) < len(origins):
        return origins[int(found[1])].of(param[found.end() :])
    for theirs, ours in _OURS.items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return ours + param[len(theirs) :]
    return _FUNCTION.sub(r"\1", param)


def _check(checked: ResponseFields, hints: Hints) -> None:
    if checked.stream_options is not None and not checked.stream:
        raise InvalidRequestError("stream_options is allowed only with stream=true", "stream_options")
    if checked.top_logprobs and LOGPROBS not in (checked.include or ()):
        raise InvalidRequestError(f"top_logprobs is allowed only with include=[{LOGPROBS!r}]", "top_logprobs")
    for param, value in _hints_of(checked):
        if value is not None:
            hints.leave(InvalidRequestError(f"{param} is not supported by this server; leave it out", param))


def _hints_of(checked: ResponseFields) -> Iterator[tuple[str, str | None]]:
    """Names and values of what has no use with any model. A medium verbosity is what there is anyway."""
    for one in checked.include or ():
        yield f"include[{one}]", None if one == LOGPROBS else one
    if checked.text is not None:
        yield "text.verbosity", None if checked.text.verbosity == "medium" else checked.text.verbosity
    if checked.reasoning is not None:
        yield "reasoning.summary", checked.reasoning.summary
        yield "reasoning.generate_summary", checked.reasoning.generate_summary


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
        "logprobs": True if LOGPROBS in (checked.include or ()) else None,
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
