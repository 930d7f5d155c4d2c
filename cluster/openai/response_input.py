"""A call of the responses API as the chat that it is. Chats have the one validator; its errors get our names.

The items of `input` become messages, each with the place in the input that it came from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.openai.body import checked_fields
from cluster.openai.call import Call
from cluster.openai.fields import MAX_MESSAGES, PART_HINTS, Hints
from cluster.openai.response_fields import (
    EXTRAS,
    LOGPROBS,
    REFUSED_RESPONSE,
    FunctionTool,
    NamedFunction,
    ResponseFields,
    TextFormat,
)
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, refuse_other_models
from engine.errors import InvalidRequestError

_TEXTS = frozenset({"input_text", "output_text", "text"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_LABELS = frozenset({"id", "status", "type"})  # of items that were outputs once; they say nothing to the model
# What clients' own libraries add to outputs that they send back, and what would make prefixes be cached.
_HINTS = frozenset({"parsed", "parsed_arguments", *PART_HINTS})
# What a part of a message is called in what it was made from.
_CALL = re.compile(r"\.tool_calls\[(\d+)\](.*)", re.DOTALL)
_CALL_NAMES = {".id": ".call_id", ".function.name": ".name", ".function.arguments": ".arguments"}
_TEXT_NAMES: Mapping[str, str] = {".content": "", ".role": ""}
_ITEM_NAMES: Mapping[str, str] = {}
_OUTPUT_NAMES: Mapping[str, str] = {".content": ".output", ".role": ".type", ".tool_call_id": ".call_id"}
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
class ResponseCall:
    """An accepted call: what the client sent, and the chat that it comes to."""

    fields: ResponseFields
    call: Call


def parse_response(fields: Mapping[str, Any], model: ServedModel, keeps: bool = False) -> ResponseCall:
    """Check a call; raises `ApiError` or `InvalidRequestError` that names the first wrong field.

    keeps: whether the answer is kept, which some fields need. The input of a previous response is already in `input`.
    """
    extras = {name: fields[name] for name in EXTRAS if name in fields}
    own = {name: value for name, value in fields.items() if name not in extras}
    hints = Hints(model.strict_fields)
    checked = checked_fields(ResponseFields, own, REFUSED_RESPONSE, hints)
    refuse_other_models(checked.model, model)
    _check(checked, hints)
    _check_kept(checked, keeps)
    found = messages_of(checked.input, checked.instructions, hints)
    try:
        call = parse_chat({**_as_chat(checked), "messages": found.messages, **extras}, model)
    except InvalidRequestError as error:
        raise renamed(error, found.origins) from error
    for name in call.ignored:
        hints.ignore(our_name(name))
    return ResponseCall(checked, replace(call, request_id=f"resp_{secrets.token_hex(16)}", ignored=hints.names))


def renamed(error: InvalidRequestError, origins: Sequence[Origin] = ()) -> InvalidRequestError:
    """Return an error of the chat's validator by the names that this API has for its fields.

    origins: what each message was made from.
    """
    if error.param is None:
        return error
    return error.about(our_name(error.param, origins))


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


def _check_kept(checked: ResponseFields, keeps: bool) -> None:
    if checked.background and checked.store is False:
        raise InvalidRequestError(
            "store must be true with background=true, or left out", "store", "unsupported_value"
        )
    for param, value in (("background", checked.background), ("store", checked.store)):
        if value and not keeps:
            message = f"{param}: this server keeps no responses, its --response-retention is 0; send false"
            raise InvalidRequestError(message, param, "unsupported_value")


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
                raise InvalidRequestError(f"{param} is missing", param, "missing_required_parameter")
        return {"type": wanted.type, "json_schema": labels}
    if labels:
        param = f"text.format.{next(iter(labels))}"
        raise InvalidRequestError(f"{param} is allowed only with type 'json_schema'", param)
    return {"type": wanted.type}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a message was made from. path: as clients write it. names: of its parts, where they differ.

    calls: paths of the items of its calls; where it has no other item, the first of them is its own.
    """

    path: str
    names: Mapping[str, str]
    calls: list[str] = field(default_factory=list)

    def of(self, part: str) -> str:
        """Return the path of a part of the message, such as ".content" or ".tool_calls[0].function.name"."""
        if found := _CALL.fullmatch(part):
            number = int(found[1])
            item = self.calls[number] if number < len(self.calls) else self.path
            return item + _CALL_NAMES.get(found[2], "")
        if part == ".tool_calls":
            return self.calls[0] if self.calls else self.path
        return self.path + self.names.get(part, part)


class InputMessages:
    """Collects the messages. origins: of each. hints: notes what has no use."""

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self.messages: list[dict[str, Any]] = []
        self.origins: list[Origin] = []

    def add(self, path: str, message: dict[str, Any], names: Mapping[str, str] = _ITEM_NAMES) -> None:
        """Append a message."""
        self.messages.append(message)
        self.origins.append(Origin(path, names))

    def add_call(self, path: str, call: dict[str, Any]) -> None:
        """Add a call to the assistant's turn: chats have all calls of one turn in one message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            self.add(path, {"role": "assistant", "content": None})
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.origins[-1].calls.append(path)


def messages_of(given: str | Sequence[Any], instructions: str | None, hints: Hints) -> InputMessages:
    """Return the chat; raises `InvalidRequestError` naming the item that is none of a text chat.

    Reasoning items are taken and left out, as chat templates leave out what was thought in earlier turns.
    """
    found = InputMessages(hints)
    if instructions is not None:
        found.add("instructions", {"role": "system", "content": instructions}, _TEXT_NAMES)
    if isinstance(given, str):
        found.add("input", {"role": "user", "content": given}, _TEXT_NAMES)
        return found
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidRequestError(f"input must hold 1 to {MAX_MESSAGES} items, not {len(given)}", "input")
    for i, item in enumerate(given):
        _add_item(f"input[{i}]", item, found)
    return found


def _add_item(origin: str, item: Any, found: InputMessages) -> None:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"{origin} must be an object", origin, "invalid_type")
    kind = item.get("type", "message")
    if kind == "message":
        found.add(origin, _message(origin, item, found.hints))
    elif kind == "function_call":
        found.add_call(origin, _call(origin, item, found.hints))
    elif kind == "function_call_output":
        found.add(origin, _output(origin, item, found.hints), _OUTPUT_NAMES)
    elif kind != "reasoning":
        known = "message, function_call, function_call_output and reasoning"
        raise InvalidRequestError(
            f"{origin}.type must be one of {known}, not {str(kind)[:100]!r}", f"{origin}.type", "unsupported_value"
        )


def _message(origin: str, item: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    _refuse_others(origin, item, {"role", "content", "name", "phase"}, hints)
    role = _string(origin, item, "role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{origin}.role must be one of {', '.join(sorted(_ROLES))}", f"{origin}.role")
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""  # it only thought, or called tools
    name = {} if item.get("name") is None else {"name": _string(origin, item, "name")}
    return {"role": role, **name, "content": _text(f"{origin}.content", content, hints)}


def _call(origin: str, item: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    _refuse_others(origin, item, {"call_id", "name", "arguments"}, hints)
    function = {"name": _string(origin, item, "name"), "arguments": _string(origin, item, "arguments")}
    return {"id": _string(origin, item, "call_id"), "type": "function", "function": function}


def _output(origin: str, item: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    _refuse_others(origin, item, {"call_id", "output"}, hints)
    text = _text(f"{origin}.output", item.get("output"), hints)
    return {"role": "tool", "tool_call_id": _string(origin, item, "call_id"), "content": text}


def _text(param: str, content: Any, hints: Hints) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{param} must be a string or a list of text parts", param, "invalid_type")
    return [_part(f"{param}[{i}]", part, hints) for i, part in enumerate(content)]


def _part(param: str, part: Any, hints: Hints) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS or not isinstance(part.get("text"), str):
        sent = f", not {kind[:40]!r}" if isinstance(kind, str) and kind not in _TEXTS else ""
        raise InvalidRequestError(
            f"{param} must be a part of type 'input_text' or 'output_text'{sent}: this model reads text only", param
        )
    # The last two come with parts that were outputs.
    _refuse_others(param, part, {"text", "annotations", "logprobs"}, hints)
    return {"type": "text", "text": part["text"]}


def _string(origin: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if isinstance(value, str):
        return value
    param = f"{origin}.{name}"
    if value is None:
        raise InvalidRequestError(f"{param} is missing", param, "missing_required_parameter")
    raise InvalidRequestError(f"{param} must be a string", param, "invalid_type")


def _refuse_others(origin: str, item: Mapping[str, Any], known: set[str], hints: Hints) -> None:
    for name, value in item.items():
        if name in known or name in _LABELS or value is None:
            continue
        param = f"{origin}.{name[:100]}"
        error = InvalidRequestError(f"{param} is not supported; leave it out", param, "unknown_parameter")
        if name not in _HINTS:
            raise error
        hints.leave(error)
