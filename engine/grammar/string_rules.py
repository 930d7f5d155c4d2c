"""The pattern by which the strings of a schema are written, of its `pattern`, `format` and lengths together."""

from __future__ import annotations

import re
from typing import Any, Final

from engine.grammar.charset import JSON_PLAIN, intersection
from engine.grammar.counted import counted_string
from engine.grammar.ebnf import Rules
from engine.grammar.formats import LENGTHS, format_pattern
from engine.grammar.keywords import FORMATS
from engine.grammar.regex import MAX_REPEAT, characters
from engine.grammar.schema_check import refuse
from engine.grammar.xgr_classes import read_as_one

# With look-around, which no grammar has: all texts of the format match them. Source: JSON schemas made by zod 4.
_AS_FORMAT: Final = {
    "^(?!\\.)(?!.*\\.\\.)"
    "([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$": "email",
    "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
    "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$": "duration",
}
FEW = 25  # characters that are counted one by one, and may be escapes
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


def counted_class(pattern: str, rules: Rules) -> str | None:
    """Return the rule of a string by a pattern of one class of characters that is counted far, without escapes.

    None where `pattern` is another one. Raises `InvalidRequestError` where the class cannot be read.
    """
    found = _ONE_CLASS.fullmatch(pattern)
    if found is None or not found[3]:
        return None
    least = int(found[3])
    most = least if not found[4] else int(found[5]) if found[5] else None
    if not FEW < max(least, most or 0) <= MAX_REPEAT or (most is not None and most < least):
        return None
    plain = intersection(characters(f"^{found[1]}$"), JSON_PLAIN)
    return counted_string(rules, plain, least, most) if read_as_one(plain) else None


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
