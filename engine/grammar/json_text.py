"""How JSON is written: one way only, as `json.dumps` does, so that no model can write blanks for ever."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.grammar.charset import JSON_ESCAPED, JSON_PLAIN, Ranges, complement, intersection, single, union
from engine.grammar.counted import counted_string
from engine.grammar.ebnf import Rules, char_class, either, literal, repeat

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


def string(rules: Rules, least: int = 0, most: int | None = None) -> str:
    """Return the rule of a string of `least` to `most` characters, without escapes where they are counted."""
    if (least, most) == (0, None):
        return rules.add(f"{literal(chr(34))} {repeat(CHAR, 0, None)} {literal(chr(34))}")
    return counted_string(rules, JSON_PLAIN, least, most)


def constant(value: Any) -> str:
    """Return an expression for one value."""
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def any_value(rules: Rules) -> str:
    """Return the rule of any JSON value."""
    name = rules.add(either(constant(True), constant(False), constant(None), rules.add(NUMBER), string(rules)))
    value = rules.reserve()
    array, members = _listed("[", value, "]"), f"{string(rules)} {COLON} {value}"
    rules.define(value, f"{name} | {array} | {_listed('{', f'({members})', '}')}")
    return value


def any_object(rules: Rules) -> str:
    """Return an expression for any JSON object."""
    return _listed("{", f"({string(rules)} {COLON} {any_value(rules)})", "}")


def listed(opening: str, items: str, closing: str) -> str:
    """Return an expression for what stands between brackets."""
    return f"{literal(opening)} {items} {literal(closing)}"


def other_name(rules: Rules, taken: Iterable[str]) -> str:
    """Return an expression for a property name, in quotes and without escapes, that is none of `taken`."""
    tree: dict[str, Any] = {}
    for name in taken:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"{literal(chr(34))} {_unlike(rules, tree)} {literal(chr(34))}"


def _unlike(rules: Rules, tree: dict[str, Any]) -> str:
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
