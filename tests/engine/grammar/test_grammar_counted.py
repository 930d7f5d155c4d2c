"""Strings of so many characters: the same lengths as the schema says, exact masks, and few of them."""

import json
import re
from functools import cache
from random import Random

import pytest

from engine.errors import InvalidRequestError
from engine.grammar.json_schema import schema_grammar
from engine.grammar.json_text import BLOCK, FAR, SPAN
from engine.grammar.xgrammar_backend import Vocabulary, XgrGrammar
from tests.grammar_walk import WORDS, allowed

END = 256
CHARS = ["x", "я", "\U0001f600"]
RUNS = [(char * count).encode() for char in CHARS for count in range(2, 70)]
BEHIND = [b'"', b'",', b'"}', b'", "a', b"\n", b"\\", b"\xd1"]
LEASTS = [1, 5, BLOCK, BLOCK + 1, FAR - 1, FAR, FAR + BLOCK - 1, FAR + BLOCK, 60, 97, 250]


@cache
def vocabulary() -> tuple[Vocabulary, list[bytes]]:
    """Every byte, and runs of characters with and without what may end a string."""
    words = [*WORDS, *RUNS, *(b"x" * count + end for count in range(1, 70) for end in BEHIND)]
    return Vocabulary(words, [END]), words


def string(least: int, most: int | None, **more: str) -> dict[str, object]:
    return {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most}), **more}


def compiled(schema: dict[str, object]) -> XgrGrammar:
    return vocabulary()[0].compile(schema_grammar(json.dumps(schema)))


def lengths(grammar: XgrGrammar, upto: int, char: str = "x") -> set[int]:
    """Return how long strings of `char` may be, at most `upto`."""
    state, found = grammar.state(), set()
    assert state.accept(ord('"'))
    for length in range(upto + 1):
        if state._matcher.accept_token(ord('"')):
            state._matcher.rollback(1)
            found.add(length)
        if not all(state.accept(byte) for byte in char.encode()):
            break
    return found


@pytest.mark.parametrize("least", [0, *LEASTS])
def test_lengths_are_those_of_the_schema(least):
    for most in [*range(least, 301, 13 if least else 1), 1000, 5000]:
        assert lengths(compiled(string(least, most)), 320) == set(range(least, min(most, 320) + 1)), most
    assert lengths(compiled(string(least, None)), 320) == set(range(least, 321))


@pytest.mark.parametrize("most", [BLOCK * SPAN * each + more for each in (1, 2, 3, 17) for more in (-1, 0, FAR, 37)])
def test_lengths_where_blocks_of_the_next_size_begin(most):
    assert lengths(compiled(string(0, most)), most + 5, "я") == set(range(most + 1))
    assert lengths(compiled(string(most, most)), most + 5) == {most}


def hold_exactly(grammar: XgrGrammar, begin: int, most: int) -> None:
    """Behind `begin` characters: a mask has the tokens that are taken, and no others."""
    _, words = vocabulary()
    state = grammar.state()
    assert all(state.accept(byte) for byte in b'"' + b"x" * begin)
    for at in range(begin, most + 1):
        told, taken = set(allowed(state, len(words))), set()
        for token in range(len(words)):
            if words[token] and state._matcher.accept_token(token):
                state._matcher.rollback(1)
                taken.add(token)
        assert {words[token] for token in told ^ taken} == set(), at
        if at < most:
            assert state.accept(ord("x"))


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, FAR), (0, 45), (0, 119), (3, 90), (FAR, 95), (FAR + BLOCK, FAR + BLOCK), (31, 58), (47, 200), (64, 64)],
)
def test_masks_have_what_is_taken_and_nothing_else(least, most):
    hold_exactly(compiled(string(least, most)), 0, most)


@pytest.mark.parametrize("most", [BLOCK * SPAN * 2 + FAR, 300, BLOCK * SPAN * (2 * SPAN + 1) + FAR])
def test_masks_where_the_larger_blocks_end(most):
    grammar = compiled(string(0, most))
    for begin in (BLOCK * SPAN - 30, most - 90):
        hold_exactly(grammar, begin, begin + 60)


def test_masks_on_random_walks_with_tokens_of_all_kinds():
    rng, (_, words) = Random(5), vocabulary()
    for _ in range(40):
        least = rng.choice([0, 0, rng.randint(0, 80)])
        state = compiled(string(least, least + rng.randint(0, 300))).state()
        while not state.finished:
            tokens = allowed(state, len(words))
            assert tokens
            for token in tokens:
                assert state._matcher.accept_token(token), words[token]
                state._matcher.rollback(1)
            assert state.accept(rng.choice(tokens))


@pytest.mark.parametrize("member", ["[a-z]", "[^,]", ".", "\\w", "[a-zé]", "[^\\d]"])
def test_a_pattern_of_one_class_counts_as_a_string_does(member):
    for least, most in ((0, 26), (1, 200), (64, 64), (30, 95), (200, None)):
        counts = f"{{{least},{'' if most is None else most}}}"
        grammar = compiled({"type": "string", "pattern": f"^{member}{counts}$"})
        assert lengths(grammar, 320) == set(range(least, min(most or 320, 320) + 1)), counts
        state = grammar.state()
        assert state.accept(ord('"'))
        taken = {char for char in map(chr, range(128)) if state.accept(ord(char)) and not state._matcher.rollback(1)}
        assert taken - {'"'} == {char for char in map(chr, range(32, 128)) if re.fullmatch(member, char)} - {
            '"',
            "\\",
        }
    hold_exactly(compiled({"type": "string", "pattern": f"^{member}{{3,80}}$"}), 0, 80)


@pytest.mark.parametrize("pattern", ["^[я-д]{1,200}$", "^[a-z]{200,100}$", "^[a-z]{1,100001}$", "^[z-a]{64}$"])
def test_a_pattern_that_cannot_be_read_is_refused_as_ever(pattern):
    with pytest.raises(InvalidRequestError, match=r"/pattern.*character \d+"):
        compiled({"type": "string", "pattern": pattern})


def test_a_class_that_needs_rules_of_its_own_is_counted_all_the_same():
    grammar = compiled({"type": "string", "pattern": "^[д-я]{30,150}$"})
    assert lengths(grammar, 200, "я") == set(range(30, 151))


def places(*strings: dict[str, object]) -> float:
    """Return the size of a grammar with these strings as properties: about that of its masks."""
    properties = {f"p{number}": each for number, each in enumerate(strings)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return compiled(schema).num_bytes


def test_a_longer_string_has_no_more_masks():
    """A mask takes xgrammar 30 ms for 128,000 tokens, and 10 s are given to a grammar."""
    base = places(string(0, 100))
    for most in (101, 128, 129, 200, 1000, 5000, 100_000):
        assert places(string(0, most)) < 1.5 * base, most
        assert places({"type": "string", "pattern": f"^.{{0,{most}}}$"}) < 1.5 * base, most
    for least in (30, 100, 1000):
        assert places(string(least, None)) < 1.5 * base, least
        assert places(string(least, least)) < 1.5 * base, least
        assert places(string(least, 4 * least)) < 2 * base, least


def test_strings_of_other_lengths_share_their_masks():
    many = [string(number % 3, 80 + 37 * number) for number in range(12)]
    assert places(*many) < 2.5 * places(many[2])
