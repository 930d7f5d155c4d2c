"""Rules of numbers between bounds and of multiples, and of strings by their `pattern`, `format` and lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from engine.errors import InvalidRequestError
from engine.grammar.gbnf import JSON_PLAIN, GrammarRules, either, intersection, literal, read_as_one
from engine.grammar.json_text import counted_string
from engine.grammar.regex import MAX_REPEAT, characters
from engine.grammar.schema_check import FORMATS, refuse

MAX_DIGITS = 15  # what a double holds exactly: two different texts are two different numbers
MAX_MULTIPLE_DIGITS = 9  # each digit of a multiple needs a rule for each remainder
_TOP = Decimal(10) ** MAX_DIGITS - 1
_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"(19|20)[0-9]{{2}}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Each text can be read in one way only: where an end may be an end or not, each token is dear to check.
_LABEL = "[A-Za-z0-9]{1,30}(-[A-Za-z0-9]{1,15})?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,6}W|[0-9]{1,6}D(T[0-9]{1,6}H)?|T[0-9]{1,6}[HMS])",
    "email": rf"[A-Za-z0-9]{{1,30}}([_+\-][A-Za-z0-9]{{1,15}}){{0,2}}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"[a-z][a-z0-9+.\-]{{0,20}}://{_HOST}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~\-]{{0,90}}){{0,20}}",
}
# Characters of the shortest and the longest text that is written. Of a URI, pydantic allows 2,083.
LENGTHS = {
    "date": (10, 10),
    "time": (9, 21),
    "date-time": (20, 32),
    "duration": (3, 16),
    "email": (6, 228),
    "hostname": (1, 234),
    "ipv4": (7, 15),
    "ipv6": (15, 39),
    "uuid": (36, 36),
    "uri": (5, 2083),
}
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


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """What a number must satisfy. low and high: inclusive unless open; None = none. multiple: what divides it."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: int = 1


def bounds_of(schema: dict[str, Any]) -> NumberBounds:
    """Return what a schema says of its numbers."""
    lows = [
        (Decimal(repr(schema[name])), name != "minimum") for name in ("minimum", "exclusiveMinimum") if name in schema
    ]
    highs = [
        (Decimal(repr(schema[name])), name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in schema
    ]
    low, low_open = max(lows, default=(None, False))
    high, closed = min(highs, default=(None, True))
    return NumberBounds(low, high, low_open, not closed, int(schema.get("multipleOf", 1)))


def bounded(rules: GrammarRules, bounds: NumberBounds, whole: bool) -> str:
    """Return an expression for the numbers within `bounds`. whole: integers only.

    Raises `InvalidRequestError` when there is no such number, or a bound has more than 15 digits.
    """
    fraction_digits = 0 if whole or bounds.multiple > 1 else _fraction_digits(bounds)
    unit = Decimal(1).scaleb(-fraction_digits)
    top = _TOP if bounds.multiple == 1 else Decimal(10) ** MAX_MULTIPLE_DIGITS - 1
    low = -_TOP if bounds.low is None else _inside(bounds.low, unit, bounds.low_open, up=True)
    high = _TOP if bounds.high is None else _inside(bounds.high, unit, bounds.high_open, up=False)
    low, high = max(low, -top), min(high, top)
    options: list[str] = []
    digits = _Digits(rules, fraction_digits, bounds.multiple)
    if high >= 0:
        options += digits.between(max(low, Decimal(0)), high)
    if low < 0:
        options += [f"{literal('-')} ({each})" for each in digits.between(max(-high, unit), -low)]
    if not options:
        raise InvalidRequestError("no number of at most 15 digits lies between minimum and maximum", "structured")
    return rules.add(either(*options))


def _fraction_digits(bounds: NumberBounds) -> int:
    """Return how many digits may follow the point, such that none is lost in a double."""
    known = [bound for bound in (bounds.low, bounds.high) if bound is not None]
    whole = max(len(str(abs(int(bound)))) for bound in known)
    if len(known) < 2:
        whole = max(whole, MAX_DIGITS - 4)  # the other side is open: large numbers have few digits behind the point
    return max(0, MAX_DIGITS - whole)


def _inside(bound: Decimal, unit: Decimal, is_open: bool, up: bool) -> Decimal:
    """Return the outermost multiple of `unit` that satisfies the bound."""
    if abs(bound) > _TOP * 10:
        return Decimal(10**30 if bound > 0 else -(10**30))
    nearest = bound.quantize(unit, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    if is_open and nearest == bound:
        return nearest + unit if up else nearest - unit
    return nearest


class _Digits:
    """Rules for the digits of numbers that are not negative, of a fixed form."""

    def __init__(self, rules: GrammarRules, fraction_digits: int, multiple: int) -> None:
        self._rules = rules
        self._fraction = fraction_digits
        self._multiple = multiple
        self._known: dict[tuple[str, str, int], str | None] = {}

    def between(self, low: Decimal, high: Decimal) -> list[str]:
        """Return expressions for the numbers from `low` to `high`, one for each count of digits before the point."""
        if low > high:
            return []
        least, most = self._spelled(low), self._spelled(high)
        options: list[str] = []
        for count in range(len(least) - self._fraction, len(most) - self._fraction + 1):
            width = count + self._fraction
            first = least if len(least) == width else "1" + "0" * (width - 1)
            last = most if len(most) == width else "9" * width
            found = self._rest(first, last, 0)
            options += [found] if found else []
        return options

    def _spelled(self, number: Decimal) -> str:
        digits = str(int(number.scaleb(self._fraction)))
        return digits.rjust(self._fraction + 1, "0")

    def _rest(self, low: str, high: str, remainder: int) -> str | None:
        """Return the rule of the digits that are left, between `low` and `high`, both of their length; None if none.

        Of the digits behind the point those may be left out that are zeros.
        """
        key = low, high, remainder
        if key not in self._known:
            self._known[key] = self._made(low, high, remainder)
        return self._known[key]

    def _made(self, low: str, high: str, remainder: int) -> str | None:
        if not low:
            return '""' if remainder == 0 else None
        options: list[str] = []
        behind = len(low) <= self._fraction
        if behind and int(low) == 0:
            options.append('""')
        point = '"." ' if self._fraction and len(low) == self._fraction else ""
        for digit in range(int(low[0]), int(high[0]) + 1):
            next_low = low[1:] if digit == int(low[0]) else "0" * (len(low) - 1)
            next_high = high[1:] if digit == int(high[0]) else "9" * (len(high) - 1)
            rest = self._rest(next_low, next_high, (remainder * 10 + digit) % self._multiple)
            if rest is not None:
                options.append(f"{point}{literal(str(digit))} {rest}")
        return self._rules.add(either(*options)) if options else None


def format_pattern(name: str) -> str:
    """Return the pattern of format `name`, one of `schema_check.FORMATS`."""
    return f"^{_PATTERNS[name]}$"


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


def counted_class(pattern: str, rules: GrammarRules) -> str | None:
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
