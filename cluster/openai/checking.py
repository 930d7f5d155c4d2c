"""Names and types of a request's fields, checked against its schema; the first wrong one is named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from cluster.errors import ApiError
from cluster.openai.field_types import Fields
from cluster.openai.hints import Hints
from cluster.openai.refusals import Refusal
from cluster.openai.served_model import ServedModel
from engine.errors import InvalidRequestError

MAX_PRIORITY = 2**31 - 1
_NO_REFUSALS: Mapping[str, Refusal] = {}
T = TypeVar("T", bound=Fields)


def checked_fields(
    schema: type[T],
    fields: Mapping[str, Any],
    refused: Mapping[str, Refusal] = _NO_REFUSALS,
    hints: Hints | None = None,
) -> T:
    """Return the fields as `schema`; a field that is null counts as not sent. hints: notes those without use.

    Raises `InvalidRequestError` naming the first wrong field, unknown and refused ones before wrong types.
    """
    hints = Hints(strict=True) if hints is None else hints
    given = {}
    for name, value in fields.items():
        if name not in schema.model_fields:
            _refuse(name, value, refused, schema, hints)
        elif value is not None:
            given[name] = value
    try:
        return schema.model_validate(given, context=hints)
    except ValidationError as error:
        raise _type_error(error, schema) from None


def check_priority(priority: int, model: ServedModel) -> None:
    """Raise `InvalidRequestError` for a priority out of range, and for one that the server would not heed."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
    if priority and not model.by_priority:
        raise InvalidRequestError(
            "priority is not supported by this server, where requests run in order of arrival "
            "(--scheduling-policy fcfs); leave it out or send 0",
            "priority",
            "unsupported_parameter",
        )


def refuse_other_models(name: str, model: ServedModel) -> None:
    """Raise `ApiError` (404) unless `name` is one of the served model's."""
    if name not in model.names:
        raise unknown_model(name, model.names)


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the error (404) for a model that is not served."""
    there = ", ".join([repr(one) for one in known])
    message = f"the model {name[:100]!r} does not exist here; this server has {there}"
    return ApiError("model_not_found", message, param="model")


def _refuse(name: str, value: Any, refused: Mapping[str, Refusal], schema: type[Fields], hints: Hints) -> None:
    refusal = refused.get(name)
    if refusal is not None:
        if refusal.lets_through(value):
            return
        error = InvalidRequestError(
            f"{name} is not supported by this server; {refusal.instead}", name, "unsupported_parameter"
        )
        if not refusal.is_hint(value):
            raise error
        hints.leave(error)
        return
    near = difflib.get_close_matches(name[:100], schema.model_fields, n=1, cutoff=0.75)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidRequestError(f"unknown field {name[:100]}{hint}", name[:100], "unknown_parameter")


def _type_error(error: ValidationError, schema: type[Fields]) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        hint = "; GET /v1/models tells which there is" if param == "model" else ""
        return InvalidRequestError(f"{param} is missing{hint}", param, "missing_parameter")
    if first["type"] == "extra_forbidden":
        hint = _neighbours(first["loc"], schema)
        return InvalidRequestError(f"{param} is not supported; {hint}", param, "unknown_parameter")
    message = first["msg"] if first["msg"].startswith("must ") else _as_demand(first["msg"])
    return InvalidRequestError(f"{param} {message}", param, "invalid_type")


def _neighbours(location: tuple[int | str, ...], schema: type[Fields]) -> str:
    """What may stand in place of the unknown field at `location`, where a field of the request holds it directly."""
    field = schema.model_fields.get(str(location[0])) if len(location) == 2 else None
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Fields):
            names = [one.alias or name for name, one in kind.model_fields.items()]
            return "use one of " + ", ".join(names)
    return "leave it out"


def _as_demand(message: str) -> str:
    """Pydantic's own words, reading on after the field's name."""
    return "must be " + message.removeprefix("Input should be ")


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as clients write it: `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path[:200]
