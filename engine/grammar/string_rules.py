"""The pattern by which the strings of a schema are written, of its `pattern`, `format` and lengths together."""

from __future__ import annotations

import re
from typing import Any, Final

from engine.grammar.formats import LENGTHS, format_pattern
from engine.grammar.keywords import FORMATS
from engine.grammar.schema_check import refuse

# With look-around, which no grammar has: all texts of the format match them. Source: JSON schemas made by zod 4.
_AS_FORMAT: Final = {
    "^(?!\\.)(?!.*\\.\\.)"
    "([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$": "email",
    "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
    "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$": "duration",
}
# One class of characters, repeated: its counts can be clipped.
_ONE_CLASS = re.compile(r"\^(\[\^?(?:[^\[\]\\]|\\.)+\]|\\[dwsDWS]|\.)(?:([*+])|\{(\d{1,6})(,(\d{0,6}))?\})\$")


def string_pattern(schema: dict[str, Any], at: str) -> str | None:
    """Return the pattern, None where the lengths alone say what may be written.

    Raises `InvalidRequestError` for what cannot be enforced together. at: the schema's pointer.
    """
    pattern: str | None = schema.get("pattern")
    name = _AS_FORMAT.get(pattern or "", schema.get("format"))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    length = "maxLength" if most is not None else "minLength"
    if name in FORMATS and (pattern is None or pattern in _AS_FORMAT):
        shortest, longest = LENGTHS[name]
        if least > shortest or (most is not None and most < longest):
            refuse(at, f"format and {length} together cannot be enforced", "not_supported")
        return format_pattern(name)
    if pattern is None or (not least and most is None):
        return pattern
    found = _clipped(pattern, least, most)
    if found is None:
        refuse(at, f"pattern and {length} together cannot be enforced", "not_supported")
    return found


def _clipped(pattern: str, least: int, most: int | None) -> str | None:
    """Return `pattern` for texts of `least` to `most` characters, None where it is not made of one class."""
    found = _ONE_CLASS.fullmatch(pattern)
    if found is None:
        return None
    members, sign, low, upto, high = found.groups()
    fewest = int(low) if low else int(sign == "+")
    limits = [most] if most is not None else []
    if low and not upto:
        limits.append(fewest)
    elif high:
        limits.append(int(high))
    fewest = max(fewest, least)
    if limits and min(limits) < fewest:
        return None
    return f"^{members}{{{fewest},{min(limits) if limits else ''}}}$"
