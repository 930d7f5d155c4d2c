"""Regular expressions as rules of a grammar: what Python's and ECMAScript's dialects have in common.

What comes out matches no text that either dialect would not: digits and word characters are ASCII's, `\\D` and `\\W`
the rest of ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import InvalidRequestError
from engine.grammar.gbnf import (
    ANY_SPACE,
    ASCII,
    DIGIT,
    EVERYTHING_IN_LINE,
    SPACE,
    WORD,
    GrammarRules,
    Ranges,
    complement,
    either,
    intersection,
    repeat,
    single,
    union,
)

MAX_REPEAT = 100_000
MAX_DEPTH = 64
MAX_COUNTED = 200_000  # characters that counts stand for: counts within counts are what makes matching slow
_SHORTHANDS = {
    "d": DIGIT,
    "w": WORD,
    "s": SPACE,
    "D": intersection(ASCII, complement(DIGIT)),
    "W": intersection(ASCII, complement(WORD)),
    "S": complement(ANY_SPACE),
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)")
_COUNTS = re.compile(r"\{(\d+)(,(\d*))?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression as an expression of a grammar. anchored: whether it begins with ^, and ends with $."""

    body: str
    begins: bool
    ends: bool


def convert(pattern: str, spell: Callable[[Ranges], str], rules: GrammarRules) -> Pattern:
    """Return `pattern` as an expression over rules added to `rules`. spell: how a set of characters is written.

    Raises `InvalidRequestError` saying what cannot be read or has no place in a grammar, and at which character.
    """
    return _Parser(pattern, spell, rules).parse()


def characters(pattern: str) -> Ranges:
    """Return the characters that `pattern`, of one character, matches. Raises `InvalidRequestError` as `convert`."""
    found: list[Ranges] = []

    def noted(ranges: Ranges) -> str:
        found.append(ranges)
        return ""

    convert(pattern, noted, GrammarRules())
    return found[0]


class _Parser:
    def __init__(self, pattern: str, spell: Callable[[Ranges], str], rules: GrammarRules) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._counted_size = 0  # of all up to here
        self._spell = spell
        self._rules = rules

    def parse(self) -> Pattern:
        options = [self._anchored()]
        while self._take("|"):
            options.append(self._anchored())
        if self._at < len(self._text):
            what = self._text[self._at]
            hint = "; ^ and $ may stand at the ends of the whole only, put (?:...) around alternatives"
            raise self._error(f"{what!r} has no place there{hint if what in '|$^' else ''}")
        if len({(each.begins, each.ends) for each in options}) > 1:
            raise self._error("^ and $ beside | belong to one alternative only; put (?:...) around the alternatives")
        return Pattern(either(*[each.body for each in options]), options[0].begins, options[0].ends)

    def _anchored(self) -> Pattern:
        begins = self._take("^")
        return Pattern(self._sequence(), begins, self._take("$"))

    def _alternatives(self) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return either(*options)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            before = self._counted_size
            atom = self._atom()
            parts.append(self._counted(atom, before))
        return " ".join(parts) or '""'

    def _counted(self, atom: str, before: int) -> str:
        """Take how often `atom` comes, whose size was added to `before`."""
        least, most = self._counts()
        size = max(1, self._counted_size - before)
        self._counted_size = before + size * max(1, least if most is None else most)
        if self._counted_size > MAX_COUNTED:
            raise self._error(f"its counts multiply to more than {MAX_COUNTED} characters")
        if (least, most) == (1, 1):
            return atom
        self._take("?")  # lazy or greedy, the same texts match
        if self._peek() in "+*?" and self._peek():
            raise self._error("a quantifier follows a quantifier")
        return repeat(self._rules.add(atom) if len(atom) > 64 else atom, least, most)

    def _counts(self) -> tuple[int, int | None]:
        for sign, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return found
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            return 1, 1
        self._at = counts.end()
        least = int(counts[1][:9])
        most = least if counts[2] is None else int(counts[3][:9]) if counts[3] else None
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise self._error(f"{counts[0]} must count upwards, to at most {MAX_REPEAT}")
        return least, most

    def _atom(self) -> str:
        char = self._text[self._at]
        if char == "(":
            return self._group()
        if char == "[":
            return self._spell(self._class())
        if char in "*+?^" or _COUNTS.match(self._text, self._at):
            raise self._error("^ may stand at the beginning only" if char == "^" else f"{char!r} repeats nothing")
        if self._text.startswith("{,", self._at):
            raise self._error("'{,' counts in some dialects only; write {0, or \\\\{,")
        self._at += 1
        if char == ".":
            return self._spell(EVERYTHING_IN_LINE)
        return self._spell(self._escape() if char == "\\" else single(self._checked(char)))

    def _group(self) -> str:
        opening = _GROUP.match(self._text, self._at)
        if opening is None and self._text.startswith("(?", self._at):
            raise self._error(f"{self._text[self._at : self._at + 4]!r} (look-around or a flag) is not supported")
        self._at = opening.end() if opening else self._at + 1
        body = self._alternatives()
        if not self._take(")"):
            raise self._error(
                "a group is not closed, or holds a $" if self._peek() == "$" else "a group is not closed"
            )
        return f"({body})"

    def _class(self) -> Ranges:
        self._at += 1
        negated, shorthand = self._take("^"), False
        found: list[Ranges] = []
        while not self._take("]"):
            first = self._member()
            shorthand |= isinstance(first, tuple)
            if isinstance(first, str) and self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                found.append(self._range(first, self._member()))
            else:
                found.append(first if isinstance(first, tuple) else single(first))
        members = union(*found)
        if negated:
            members = complement(members)
            members = intersection(members, ASCII) if shorthand else members
        if not members:
            raise self._error("a class of characters is empty")
        return members

    def _range(self, first: str, last: str | Ranges) -> Ranges:
        if isinstance(last, tuple) or last < first:
            raise self._error("a range of characters runs backwards")
        return intersection(((ord(first), ord(last)),), complement(()))

    def _member(self) -> str | Ranges:
        """Take one member of a class: a character, or the set that a shorthand stands for."""
        if self._at >= len(self._text):
            raise self._error("a class of characters is not closed")
        char = self._text[self._at]
        if char == "[" or self._text[self._at : self._at + 2] in ("--", "&&", "||", "~~"):
            raise self._error(f"write {char!r} with a backslash in a class")
        self._at += 1
        if char != "\\":
            return self._checked(char)
        if self._peek() == "b":
            raise self._error("\\b is not supported")
        name = self._peek()
        found = self._escape()
        return found if name in _SHORTHANDS else chr(found[0][0])

    def _escape(self) -> Ranges:
        code = _CODE.match(self._text, self._at)
        if code is not None:
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            return single(self._checked(chr(min(number, 0x10FFFF))))
        name = self._peek()
        self._at += 1
        if name in _SHORTHANDS and name:
            return _SHORTHANDS[name]
        if name in _CONTROLS and name and not (name == "0" and self._peek().isdigit()):
            return single(_CONTROLS[name])
        if not name or name.isalnum():
            raise self._error(f"'\\{name}' (a boundary, a back-reference or unknown) is not supported")
        return single(self._checked(name))

    def _checked(self, char: str) -> str:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self._error("half of a surrogate pair is no character")
        return char

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        found = self._peek() == char
        self._at += found
        return found

    def _error(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"the regular expression at character {self._at}: {problem}", "structured")
