"""Classes of characters such that xgrammar never allows a token that it then refuses.

Where a token may go on behind the end of a rule, xgrammar works out beforehand which tokens can, from what follows.
There it looks at the lowest byte of a class's bounds alone for an ASCII character: U+E000 to U+FFFF, 00 to FF, would
take all of them, U+0430 to U+044F, 30 to 4F, the digits. So classes are written with bounds whose lowest bytes hold
no ASCII character that is not in the class; a part for which there are none becomes a rule of its own, which it reads
well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.grammar.charset import ASCII, LAST, Ranges, complement, intersection, union
from engine.grammar.ebnf import char_class, literal

# What stands in a grammar: strings, comments, and classes of characters (with the count that follows one).
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\r\n])*"|#[^\r\n]*|\[(?P<not>\^?)(?P<body>(?:\\.|[^\]\\\r\n])*)\](?![ \t]*::=)'
    r"(?P<count>\s*\{\s*(?P<least>\d{1,9})\s*(?P<open>,\s*(?P<most>\d{1,9})?)?\s*\})?"
)
_MEMBER = re.compile(r"\\x([0-9A-Fa-f]+)|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([^xuUdDsSwW])|([^\\])", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_BEYOND: Ranges = ((0x80, LAST),)
_PRIVATE = (0xE000, 0xE000)
MAX_CHAIN = 512  # counts up to this are written out, for which masks are known beforehand


def truthful(grammar: str, inner: Ranges = ASCII) -> str:
    """Return `grammar` (GBNF) with the same language, its classes such that they are read the same everywhere.

    inner: ASCII characters that tokens hold behind their first byte; no other one can be taken for what it is not.
    What cannot be read is left for xgrammar to refuse. U+E000, the first character for private use, is left out of a
    class that holds others, where it would need a rule of its own: that is worth no string's speed.
    """
    prefix = "k"
    while re.search(rf"\b{prefix}\d", grammar):
        prefix += "k"
    writer = _Writer(prefix, inner)
    text = _PARTS.sub(writer.rewritten, grammar)
    added = [f"{name} ::= {body}" for body, name in writer.rules.items()]
    return "\n".join([text, *added, ""]) if added else text


def read_as_one(ranges: Ranges) -> bool:
    """Return whether `truthful` leaves a class of these characters a class, whatever the tokens are."""
    return len(_options(ranges, ASCII)) == 1


class _Writer:
    def __init__(self, prefix: str, inner: Ranges) -> None:
        self.rules: dict[str, str] = {}  # body -> name
        self._inner = inner
        self._prefix = prefix

    def rewritten(self, found: re.Match[str]) -> str:
        """Return what stands for one part of a grammar."""
        body = found["body"]
        if body is None:
            return found[0]
        ranges = _ranges(body)
        if ranges is None or not any(high > 0x7F for _, high in ranges):
            return found[0]
        options = _options(complement(ranges) if found["not"] else ranges, self._inner)
        if len(options) == 1:
            return options[0] + (found["count"] or "")
        name = self._rule(" | ".join(options))
        if found["count"] is None:
            return name
        least = int(found["least"])
        most = least if found["open"] is None else int(found["most"]) if found["most"] else None
        if max(least, most or 0) > MAX_CHAIN or (most is not None and most < least):
            return name + found["count"]
        return self._counted(name, least, most)

    def _counted(self, name: str, least: int, most: int | None) -> str:
        """Return the rule for `name`, counted: in a chain, whose masks are known beforehand, as a class's are."""
        rest = f"({name})*" if most is None else '""'
        for number in range((least if most is None else most) - 1, -1, -1):
            tail = "" if rest == '""' else f" {rest}"
            rest = self._rule(f"{name}{tail}" if number < least else f'"" | {name}{tail}')
        return rest

    def _rule(self, body: str) -> str:
        return self.rules.setdefault(body, f"{self._prefix}{len(self.rules)}")


def _ranges(body: str) -> list[tuple[int, int]] | None:
    """Return what the members of a class are, None where they cannot be read."""
    codes: list[tuple[int, bool]] = []  # and whether it may stand for a range
    at = 0
    while at < len(body):
        member = _MEMBER.match(body, at)
        if member is None:
            return None
        at = member.end()
        digits = member[1] or member[2] or member[3]
        char = member[5] or _SHORT.get(member[4] or "", member[4] or "")
        code = int(digits, 16) if digits else ord(char)
        if code > LAST:
            return None
        codes.append((code, member[5] == "-"))
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(codes):
        ranged = at + 2 < len(codes) and codes[at + 1][1]
        last = codes[at + 2 * ranged][0]
        found.append((codes[at][0], last))
        at += 1 + 2 * ranged
    return None if any(low > high for low, high in found) else found


def inner_ascii(tokens: Iterable[bytes]) -> Ranges:
    """Return the ASCII characters that `tokens` hold behind their first byte."""
    found = {byte for token in tokens for byte in token[1:]}
    return union(*(((byte, byte),) for byte in found if byte < 0x80))


def _options(ranges: Iterable[tuple[int, int]], inner: Ranges) -> list[str]:
    """Return expressions for the characters of `ranges`; one, if one class says them all."""
    whole = complement(complement(ranges))
    plain = intersection(whole, ASCII)
    together, apart = list(plain), list[tuple[int, int]]()
    for low, high in intersection(whole, _BEYOND):
        safe, rest = _split(low, high)
        together += safe
        for part in rest:
            seen = intersection(inner, ((part[0] & 0xFF, part[1] & 0xFF),))
            (together if intersection(plain, seen) == seen else apart).append(part)
    if together:
        apart = [part for part in apart if part != _PRIVATE]
    options = [char_class(tuple(together))] if together else []
    for low, high in apart:
        if low == high:
            options.append(literal(chr(low)))
        else:  # never alone in its rule: a rule of one class is read as the class
            middle = (low + high) // 2
            options += [char_class(((low, middle),)), char_class(((middle + 1, high),))]
    return options


def _split(low: int, high: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return ranges, which may overlap, whose bounds' lowest bytes hold no ASCII character; and what is left over."""
    page = low & ~0xFF
    if low & 0xFF >= 0x80 or low & 0xFF > high & 0xFF:
        return [(low, high)], []
    if page == high & ~0xFF:
        upper = [(page | 0x80, high)] if high & 0xFF >= 0x80 else []
        return upper, [(low, min(high, page | 0x7F))]
    if low == page:
        safe, _ = _split(low + 1, high)
        return safe, [(low, low)]
    return [(low, (high & ~0xFF) | ((low & 0xFF) - 1)), (page | 0x80, high)], []
