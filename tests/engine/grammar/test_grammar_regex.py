"""Regular expressions and bounds of numbers as grammars, against Python's own `re` and comparisons."""

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.grammar.gbnf import GrammarRules
from engine.grammar.json_text import spell_in_string, spell_raw
from engine.grammar.regex import convert
from engine.grammar.scalar_rules import NumberBounds, bounded
from tests.grammar_walk import compiled, texts

PATTERNS = [
    "ab+",
    "^ab+$",
    "^$|^(?:a|b)c$",
    "[a-c]{2,4}(x|yz)?",
    '"\\\\\\n.',
    "[^a\\d]\\D\\W\\S\\s",
    "(?:a|b){3}\\.\\-[\\]\\-x]",
    "é[à-ü]☃+😀",
    "\\x41\\u0042\\t",
    ".*",
    "",
    "a{0}b{2}",
    "(a+)+b",
    "(?P<name>a|)c*?d??",
    "[\\]a]",
    "[-a]{1}",
    "\\d{4}-\\d{2}",
]
REFUSED = [
    "(",
    ")",
    "[",
    "[]",
    "a**",
    "*a",
    "(?=a)b",
    "(?i)a",
    "(a)\\1",
    "\\bword",
    "a^b",
    "a$b",
    "^a|b$",
    "^a|b",
    "a|b$",
    "[z-a]",
]
REFUSED += [
    "a{3,1}",
    "a{999999}",
    "a{1}{2}",
    "[a&&b]",
    "\\ud800",
    "\\p{L}",
    "(" * 100 + ")" * 100,
    "a\\",
    "[\\b]",
    "a++",
]


def grammar(pattern, spell=spell_raw, quote=""):
    rules = GrammarRules()
    return compiled(rules.text(f"{quote} ({convert(pattern, spell, rules).body}) {quote}"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_text_that_is_allowed_matches_as_a_whole(pattern):
    plain = texts(grammar(pattern), 40)
    quoted = texts(grammar(pattern, spell_in_string, '"\\u0022"'), 40)
    assert len(plain) > 10
    assert len(quoted) > 10
    for text in [*[each.decode() for each in plain], *map(json.loads, quoted)]:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_has_no_place_in_a_grammar_is_refused_with_its_place(pattern):
    with pytest.raises(InvalidRequestError, match="at character"):
        grammar(pattern)


atoms = st.sampled_from(["a", "b", "\\d", ".", "[^a]", "\\.", "é", "[a-c\\s]", "(a|b)", "(?:ab|)"])
pieces = st.tuples(atoms, st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "*?"])).map("".join)


@settings(max_examples=60)
@given(st.lists(pieces, min_size=1, max_size=5), st.booleans())
def test_random_patterns_allow_only_what_python_matches(parts, split):
    pattern = "|".join(parts) if split else "".join(parts)
    for text in texts(grammar(pattern), 5):
        assert re.fullmatch(pattern, text.decode()), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("(a|b)*c", "abbac"), ("[^x]+", "naïve \U0001f600"), ("\\S{2}", "日本"), ("a{2,}", "aaaa"), ("\\w+ ?", "x_9 ")],
)
def test_texts_that_match_are_allowed(pattern, text):
    state = grammar(pattern).state()
    assert all(state.accept(byte) for byte in text.encode())
    assert state.accept(256)
    assert state.finished


bounds = st.decimals(-1000, 1000, places=3) | st.integers(-(10**6), 10**6).map(Decimal)


@settings(max_examples=80)
@given(st.none() | bounds, st.none() | bounds, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 12))
def test_numbers_lie_within_their_bounds(low, high, low_open, high_open, whole, multiple):
    wanted = NumberBounds(low, high, low_open, high_open, multiple)
    if wanted == NumberBounds(low_open=low_open, high_open=high_open):
        return
    rules = GrammarRules()
    try:
        root = bounded(rules, wanted, whole)
    except InvalidRequestError:
        assert low is not None
        assert high is not None
        assert high - low < (2 * multiple if whole or multiple > 1 else 1)
        return
    found = texts(compiled(rules.text(root)), 8)
    assert found
    for text in found:
        number = json.loads(text)
        assert low is None or number > low or (number == float(low) and not low_open)
        assert high is None or number < high or (number == float(high) and not high_open)
        assert number % multiple == 0 or multiple == 1
        assert not whole or isinstance(number, int)


@pytest.mark.parametrize("number", ["0", "7", "10", "99", "100", "-1", "-25"])
def test_numbers_within_their_bounds_can_be_written(number):
    rules = GrammarRules()
    root = bounded(rules, NumberBounds(Decimal(-25), Decimal(100)), whole=True)
    state = compiled(rules.text(root)).state()
    assert all(state.accept(byte) for byte in number.encode())
    assert state.accept(256)
