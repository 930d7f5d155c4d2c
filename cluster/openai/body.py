"""JSON bodies of any endpoint: read, and held against what a request may say, in errors that name the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from cluster.errors import ApiError
from cluster.openai.fields import Fields, Hints
from cluster.openai.refusals import Refusal
from engine.errors import InvalidRequestError

_NO_REFUSALS: Mapping[str, Refusal] = {}
T = TypeVar("T", bound=Fields)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; raises `ApiError` (400) when the body is none."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise ApiError("invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_json", "the request body must be a JSON object")
    return fields


def packed_json(fields: Mapping[str, Any]) -> bytes:
    """Return a body of these fields without blanks, which `parse_json` reads as the same ones."""
    return to_json(fields, inf_nan_mode="constants")


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
        return InvalidRequestError(f"{param} is missing{hint}", param, "missing_required_parameter")
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
