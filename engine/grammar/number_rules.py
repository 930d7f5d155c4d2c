"""Numbers between bounds, and whole numbers that are multiples, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from engine.errors import InvalidRequestError
from engine.grammar.ebnf import Rules, either, literal

MAX_DIGITS = 15  # what a double holds exactly: two different texts are two different numbers
MAX_MULTIPLE_DIGITS = 9  # each digit of a multiple needs a rule for each remainder
_TOP = Decimal(10) ** MAX_DIGITS - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number must satisfy. low and high: inclusive unless open; None = none. multiple: what divides it."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: int = 1


def bounds_of(schema: dict[str, Any]) -> Bounds:
    """Return what a schema says of its numbers."""
    lows = [
        (Decimal(repr(schema[name])), name != "minimum") for name in ("minimum", "exclusiveMinimum") if name in schema
    ]
    highs = [
        (Decimal(repr(schema[name])), name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in schema
    ]
    low, low_open = max(lows, default=(None, False))
    high, closed = min(highs, default=(None, True))
    return Bounds(low, high, low_open, not closed, int(schema.get("multipleOf", 1)))


def bounded(rules: Rules, bounds: Bounds, whole: bool) -> str:
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


def _fraction_digits(bounds: Bounds) -> int:
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

    def __init__(self, rules: Rules, fraction_digits: int, multiple: int) -> None:
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
