"""Grammars as text: rules in GBNF, the notation of llama.cpp that xgrammar reads, over sets of characters.

`truthful` writes classes of characters such that xgrammar never allows a token that it then refuses. Where a token
may go on behind the end of a rule, xgrammar works out beforehand which tokens can, from what follows. There it looks
at the lowest byte of a class's bounds alone for an ASCII character: U+E000 to U+FFFF, 00 to FF, would take all of
them, U+0430 to U+044F, 30 to 4F, the digits. So classes are written with bounds whose lowest bytes hold no ASCII
character that is not in the class; a part for which there are none becomes a rule of its own, which it reads well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.errors import InvalidRequestError

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
MAX_TEXT = 2 * 1024 * 1024  # characters of one grammar, which may be larger than what it was made of
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


class GrammarRules:
    """Collects the rules of one grammar. Equal bodies become one rule."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._size = 0

    def add(self, body: str) -> str:
        """Return the name of a rule with this body. Raises `InvalidRequestError` when the grammar grows too large."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.reserve()
            self.define(name, body)
        return name

    def reserve(self) -> str:
        """Return the name of a rule that is defined later (it may stand in its own body)."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[name] = body
        self._size += len(name) + len(body)
        if self._size > MAX_TEXT:
            raise InvalidRequestError("what the output must match is too large; make it simpler", "structured")

    def text(self, root: str) -> str:
        """Return the grammar whose output is what `root`, the body of a rule, stands for."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]) + "\n"


def literal(text: str) -> str:
    """Return an expression that matches `text` and nothing else."""
    return '"' + "".join(map(_spelled, text)) + '"'


def char_class(ranges: Ranges) -> str:
    """Return an expression that matches one character of `ranges`."""
    spelled = [_spelled(chr(low)) + ("" if low == high else "-" + _spelled(chr(high))) for low, high in ranges]
    return "[" + "".join(spelled) + "]"


def either(*options: str) -> str:
    """Return an expression that matches what any of `options` does."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def repeat(body: str, least: int, most: int | None) -> str:
    """Return an expression for `body`, `least` to `most` times (None: any number of times)."""
    if most == 0:
        return '""'
    sign = {(1, 1): " ", (0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return f"({body})" + (sign or f"{{{least},{'' if most is None else most}}}")


def _spelled(char: str) -> str:
    """Letters and digits as they are, all else by number: nothing is left that could have a meaning of its own.

    Never as \\x, which xgrammar lets go on for as many hexadecimal digits as follow.
    """
    code = ord(char)
    if char.isascii() and (char.isalnum() or char in " ,:{}_"):
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
