"""What may be told of a wanted output in a log: its form without the client's words."""

from __future__ import annotations

import json
import re
from typing import Any

from engine.grammar.keywords import ANNOTATIONS, ENFORCED, FORMATS, REFUSED, TYPES
from engine.sampling_params import StructuredOutput

MOST = 1000  # characters
_KEYWORDS = {*ENFORCED, *REFUSED}
_OPEN_WORDS = {*TYPES, *FORMATS}
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_COUNTED = ("enum", "required", "const", "$ref", "pattern")
_COUNT_OR_WORD = re.compile(r"\{\d+(?:,\d*)?\}|\w")


def shape(wanted: StructuredOutput) -> str:
    """Return the kind and form of what is wanted, at most `MOST` characters.

    Keywords, types and numbers of a schema are kept; names, constants and patterns are told by their count or length.
    Of other texts the signs and counts are kept, each letter and digit is an x.
    """
    if wanted.kind == "json_schema":
        try:
            form = json.dumps(_form(json.loads(wanted.text)))
        except (ValueError, RecursionError):
            form = f"{len(wanted.text)} characters"
    else:
        form = _COUNT_OR_WORD.sub(lambda found: found[0] if found[0][0] == "{" else "x", wanted.text)
    return f"{wanted.kind} {form}"[:MOST].replace("\n", " ").strip()


def _form(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_form(each) for each in schema]
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else _word(schema)
    return {
        name if name in _KEYWORDS else "?": _part(name, value)
        for name, value in schema.items()
        if name not in ANNOTATIONS
    }


def _part(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {f"#{number}": _form(each) for number, each in enumerate(value.values())}
    if name in _COUNTED or name not in _KEYWORDS:
        return len(value) if isinstance(value, str | list | dict) else _word(value)
    return [_form(each) for each in value] if isinstance(value, list) else _form(value)


def _word(value: Any) -> Any:
    if isinstance(value, str):
        return value if value in _OPEN_WORDS else len(value)
    return value
