"""Moves a JSON schema into another one: its references to itself must follow.

Source: JSON Schema 2020-12, "$ref"; RFC 6901 for what stands after the `#`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequestError

MAX_DEPTH = 64
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})


def placed_under(pointer: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` for use at `pointer` (such as `#/$defs/x`): what it refers to as `#...` is there from now on.

    Raises `InvalidRequestError` naming `tools` when it is nested too deeply.
    """
    moved: dict[str, Any] = _moved(pointer, schema, 0)
    return moved


def _moved(pointer: str, schema: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"tools: parameters may be nested {MAX_DEPTH} deep at most", "tools")
    if isinstance(schema, list):
        return [_moved(pointer, one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _member(pointer, key, value, depth) for key, value in schema.items()}


def _member(pointer: str, key: str, value: Any, depth: int) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return pointer + value[1:]
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, Mapping):
        return {name: _moved(pointer, one, depth + 1) for name, one in value.items()}
    return _moved(pointer, value, depth + 1)
