"""How JSON is written: one way only, as `json.dumps` does, so that no model can write blanks for ever.

Strings of so many characters have a form that needs few masks: all such strings of a grammar share them. xgrammar
works out a mask, over all tokens, for each place where a character may come, and none where only rules do. So what is
long is counted in blocks, by rules of rules: only the places in one block have masks, and those in a tail, which is
what comes before the quote.

A token that goes on behind the end of a rule is tried each time, unless it is known what follows. Near the end of a
block that would be nearly every token: so a block says what follows, `FAR` more characters, and tokens of characters
alone are known to fit. A quote that comes sooner is taken by a tail: one may begin wherever a block does, and reaches
as far behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.grammar.gbnf import (
    JSON_ESCAPED,
    JSON_PLAIN,
    GrammarRules,
    Ranges,
    char_class,
    complement,
    either,
    intersection,
    literal,
    repeat,
    single,
    union,
)

FAR = 20  # characters; tokens that have more behind the end of a block, which are few, are tried each time
BLOCK = 6  # characters: more are more masks, fewer are more tails at the same time
SPAN = 16  # blocks that are one of the next size, so that few rules end with a string, however long it is
_REACH = FAR + BLOCK - 1  # characters that a tail beside a block must be able to take
_QUOTE = literal('"')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
COMMA, COLON = literal(", "), literal(": ")
_HEX = "[0-9a-fA-F]"
# Half of a surrogate pair is no character: other languages refuse the whole text for it.
# xgrammar keeps what each token may do in such a loop only where its options are flat: no groups within, no rules.
CHAR = " | ".join(
    [
        char_class(JSON_PLAIN),
        '"\\\\" ' + char_class(union(*map(single, '"/bfnrt\\'))),
        f'"\\\\u" [0-9a-ce-fA-CE-F] {_HEX} {_HEX} {_HEX}',
        f'"\\\\u" [dD] [0-7] {_HEX} {_HEX}',
    ]
)
INTEGER = '"-"? ("0" | [1-9] [0-9]{0,14})'
# 15 digits are exact in a double; an exponent of two digits neither overflows nor vanishes.
NUMBER = '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+\\u002d]? [0-9]{1,2})?'


def counted_string(rules: GrammarRules, characters: Ranges, least: int, most: int | None) -> str:
    """Return the rule of a JSON string of `least` to `most` (None: any number of) `characters`, none escaped."""
    return rules.add(f"{_QUOTE} {_Counted(rules, char_class(characters)).rest(least, most)}")


class _Counted:
    """Rules for the rest of a string, with its quote."""

    def __init__(self, rules: GrammarRules, char: str) -> None:
        self._rules = rules
        self._char = char

    def rest(self, least: int, most: int | None) -> str:
        """Return the rule of `least` to `most` characters and the quote."""
        if least > _REACH:
            blocks = (least - FAR) // BLOCK  # FAR characters must follow them
            left = None if most is None else most - blocks * BLOCK
            return self._behind(blocks, self.rest(least - blocks * BLOCK, left))
        if most is None or most <= least + _REACH:
            return self._tail(least, most)
        blocks = -(-least // BLOCK)
        longer = self._behind(blocks, self._at_most(most - blocks * BLOCK))
        return self._rules.add(f"{self._tail(least, least + _REACH)} | {longer}") if least else longer

    def _tail(self, least: int, most: int | None) -> str:
        """Return the same in single characters, from the quote on: tails of other lengths are parts of one chain."""
        ending = self._rules.add(_QUOTE if most is not None else f"{self._char}* {_QUOTE}")
        for _ in range(most - least if most is not None else 0):
            ending = self._rules.add(f"{_QUOTE} | {self._char} {ending}")
        for _ in range(least):
            ending = self._rules.add(f"{self._char} {ending}")
        return ending

    def _at_most(self, most: int, size: int = 0) -> str:
        """Return the rule of up to `most` characters and the quote. size: of the first blocks, 0 = as fits."""
        if not size:
            size = BLOCK
            while most >= 2 * SPAN * size + FAR:
                size *= SPAN
        blocks = max(0, (most - (size + FAR - 1)) // size)  # the rest reaches as far behind a block as `_REACH` does
        left = most - blocks * size
        ending = more = self._tail(0, left) if size == BLOCK else self._at_most(left, size // SPAN)
        for _ in range(blocks):
            more = self._rules.add(f"{ending} | {self._block(size)} {more}")
        return more

    def _behind(self, blocks: int, ending: str) -> str:
        """Return the rule of `blocks` blocks before `ending`."""
        size = 1
        while size * SPAN <= blocks:
            size *= SPAN
        while blocks:
            if size > blocks:
                size //= SPAN
            else:
                ending = self._rules.add(f"{self._block(size * BLOCK)} {ending}")
                blocks -= size
        return ending

    def _block(self, size: int) -> str:
        """Return the rule of `size` characters, behind which there may come `FAR` more."""
        if size > BLOCK:
            part = whole = self._block(size // SPAN)
            for _ in range(SPAN - 1):
                whole = self._rules.add(f"{part} {whole}")
            return whole
        # xgrammar believes what is said to follow a rule that stands in one place, with something behind it; and it
        # writes out a rule that has no others in it.
        nothing = self._rules.add('""')
        one, follows = " ".join([self._char] * BLOCK), " ".join([self._char] * FAR)
        return self._rules.add(f"{self._rules.add(f'{one} {nothing} (= {follows})')} {nothing}")


def spell_in_string(characters: Ranges) -> str:
    """Return an expression for one of `characters` as a JSON string holds it."""
    plain = intersection(characters, JSON_PLAIN)
    escaped = intersection(characters, JSON_ESCAPED)
    options = [char_class(plain)] if plain else []
    for low, high in escaped:
        options += [literal(_SHORT.get(chr(code), f"\\u{code:04x}")) for code in range(low, high + 1)]
    return either(*options)


def spell_raw(characters: Ranges) -> str:
    """Return an expression for one of `characters` as it is."""
    return char_class(characters)


def string(rules: GrammarRules, least: int = 0, most: int | None = None) -> str:
    """Return the rule of a string of `least` to `most` characters, without escapes where they are counted."""
    if (least, most) == (0, None):
        return rules.add(f"{literal(chr(34))} {repeat(CHAR, 0, None)} {literal(chr(34))}")
    return counted_string(rules, JSON_PLAIN, least, most)


def constant(value: Any) -> str:
    """Return an expression for one value."""
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def any_value(rules: GrammarRules) -> str:
    """Return the rule of any JSON value."""
    name = rules.add(either(constant(True), constant(False), constant(None), rules.add(NUMBER), string(rules)))
    value = rules.reserve()
    array, members = _listed("[", value, "]"), f"{string(rules)} {COLON} {value}"
    rules.define(value, f"{name} | {array} | {_listed('{', f'({members})', '}')}")
    return value


def any_object(rules: GrammarRules) -> str:
    """Return an expression for any JSON object."""
    return _listed("{", f"({string(rules)} {COLON} {any_value(rules)})", "}")


def listed(opening: str, items: str, closing: str) -> str:
    """Return an expression for what stands between brackets."""
    return f"{literal(opening)} {items} {literal(closing)}"


def other_name(rules: GrammarRules, taken: Iterable[str]) -> str:
    """Return an expression for a property name, in quotes and without escapes, that is none of `taken`."""
    tree: dict[str, Any] = {}
    for name in taken:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"{literal(chr(34))} {_unlike(rules, tree)} {literal(chr(34))}"


def _unlike(rules: GrammarRules, tree: dict[str, Any]) -> str:
    """Return the rule of what goes on after a common beginning, but not to the end of a name in `tree`."""
    anything = rules.add(f"{char_class(JSON_PLAIN)}*")
    letters = [char for char in tree if char and union(JSON_PLAIN, single(char)) == JSON_PLAIN]
    others = intersection(JSON_PLAIN, complement(union(*map(single, letters))))
    options = [] if "" in tree else ['""']
    options.append(f"{char_class(others)} {anything}")
    options += [f"{literal(char)} {_unlike(rules, tree[char])}" for char in letters]
    return rules.add(either(*options))


def _listed(opening: str, item: str, closing: str) -> str:
    return listed(opening, f"({item} ({COMMA} {item})*)?", closing)
