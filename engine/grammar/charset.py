"""Sets of characters as ranges of code points."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # (first, last) code points, in order, apart from each other

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # halves of characters, which UTF-8 cannot spell
ASCII: Ranges = ((0, 0x7F),)
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# White space of Unicode, Python and ECMAScript together: what is outside is none to any of them.
ANY_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x1C, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# What a JSON string holds as it is: all but controls, the quote and the backslash.
JSON_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Return what is in any of `sets`."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for each in sets for pair in each):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all other characters."""
    found: list[tuple[int, int]] = []
    first = 0
    for low, high in (*union(ranges, (_SURROGATES,)), (LAST + 1, LAST + 1)):
        if first < low:
            found.append((first, low - 1))
        first = high + 1
    return tuple(found)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return what is in both."""
    return complement(union(complement(one), complement(other)))


def single(char: str) -> Ranges:
    """Return the set of one character."""
    return ((ord(char), ord(char)),)


JSON_PLAIN = complement(JSON_ESCAPED)
EVERYTHING = complement(())
EVERYTHING_IN_LINE = complement(LINE_ENDS)
