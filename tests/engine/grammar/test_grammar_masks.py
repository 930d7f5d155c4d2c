"""Whatever a mask allows, the grammar takes: held on random walks, at sizes beyond every constant of the code."""

import json
from functools import cache
from random import Random

import pytest

from engine.grammar.gbnf import GrammarRules, truthful
from engine.grammar.json_schema import object_grammar, schema_grammar
from engine.grammar.json_text import spell_raw
from engine.grammar.regex import convert
from engine.grammar.xgrammar_backend import Vocabulary
from tests.grammar_walk import WORDS, allowed, random_schema

END = 256
LETTERS = 'abz0129 "\\,:{}[]\n\x00éÿдлЖя日一丁龥가각\ue000\U0001f600'
PARTIAL = [b"a\xd0", b'"\xe4', b"b\xe4\xb8", b" \xc3", b"\xb8\xad", b"a\xf0\x9f"]  # ends and beginnings of characters


@cache
def vocabulary() -> tuple[Vocabulary, list[bytes]]:
    """Every byte, and tokens that go on behind the end of whatever they begin with."""
    rng = Random(1)
    words = [*WORDS, *PARTIAL]
    words += ["".join(rng.choices(LETTERS, k=rng.randint(2, 7))).encode() for _ in range(900)]
    words += [("a" + one + other).encode() for one in LETTERS for other in 'a"\n\x00я一']
    words += [(char * count).encode() for char in 'aя一가"' for count in (2, 3, 9, 130)]
    return Vocabulary(words, [END]), words


def hold(text: str, seed: int, most: int, walks: int = 2) -> None:
    """Walk through a grammar and try every token that its masks allow."""
    made, words = vocabulary()
    grammar = made.compile(text)
    for number in range(walks):
        rng, state = Random(seed + number), grammar.state()
        for _ in range(most):
            tokens = allowed(state, len(words))
            assert tokens
            for token in tokens:
                assert state._matcher.accept_token(token), (words[token], text[:300])
                state._matcher.rollback(1)
            longer = [token for token in tokens if len(words[token]) > 9] or tokens
            assert state.accept(rng.choice(longer if rng.random() < 0.3 else tokens))
            if state.finished:
                break


def regex(pattern: str) -> str:
    rules = GrammarRules()
    return rules.text(convert(pattern, spell_raw, rules).body)


BOUNDS = [{"maxLength": 129}, {"maxLength": 200}, {"minLength": 130}, {"minLength": 129, "maxLength": 5000}]


@pytest.mark.parametrize("bounds", [{"minLength": 3, "maxLength": 7}, *BOUNDS], ids=str)
def test_strings_of_any_length(bounds):
    string = {"type": "string", **bounds}
    schema = {"type": "object", "properties": {"a": string, "b": {"type": "string"}}, "required": ["a"]}
    hold(schema_grammar(json.dumps(schema)), 1, most=12)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "maxLength": 150}, "minItems": 130},
        {"type": "array", "items": {"enum": ["a", "я", 1]}, "maxItems": 1000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 129, "maxItems": 140},
        {"type": "string", "pattern": "^(a|b).{2}[д-я]{130,}$"},
        {"type": "string", "pattern": "^(a|ab){1,300}[^д-яa]\\S?$"},
        {"type": "object", "propertyNames": {"maxLength": 300}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"aя": {}, "一": {}}, "additionalProperties": {"type": "null"}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schemas_beyond_every_count(schema):
    hold(schema_grammar(json.dumps(schema)), 2, most=10, walks=1)


def test_any_object():
    hold(object_grammar(), 3, most=25)


def test_random_schemas():
    rng = Random(4)
    for seed in range(25):
        hold(schema_grammar(json.dumps(random_schema(rng))), seed, most=25, walks=1)


CLASSES = [
    "[д-я]",
    "[一-龥]",
    "[가-힣]",
    "[A-Zд-яé]",
    "[^д-я]",
    "[^\\n]",
    ".",
    "\\S",
    "[\\ue000-\\uf8ff]",
    "[^a一]",
    "é",
]


@pytest.mark.parametrize("wanted", CLASSES)
def test_classes_of_regular_expressions_behind_a_group(wanted):
    for seed, counts in enumerate(("", "{2}", "{1,4}", "*", "+", "{3,}", "?")):
        hold(regex(f"z?(a|b|ab|я){wanted}{counts}{wanted}(c|d)"), seed, most=8, walks=1)


@pytest.mark.parametrize("wanted", CLASSES)
def test_classes_of_regular_expressions_that_are_counted_far(wanted):
    for seed, counts in enumerate(("{0,140}", "{129,}", "{600,700}")):
        hold(regex(f'"{wanted}{counts}"'), seed, most=3, walks=1)


@pytest.mark.parametrize(
    "member", ["д-я", "一-龥", "^д-я", "^\\x00-\\x1f", '^\\"\\\\', "\\u0400-\\u04ff", "\\]д-", "a-zé"]
)
def test_classes_of_grammars_as_clients_write_them(member):
    head = f'root ::= "z"? r [{member}] [{member}]{{0,3}} t # [д-я] "\n'
    hold(f'{head}r ::= "a" | "b" "b"? | "[я]"\nt ::= [{member}]{{130,150}} "x"\n', 5, most=6)


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        (
            'root ::= "x" [д-я]{2,3} "я]" [^д-я\\]]\n',
            ["xдля]d", "xжжжя]一"],
            ["xдdя]d", "xдbя]d", "xдля]я", "xдля]]"],
        ),
        ("root ::= [\\u0400-\\u04ff\\x41-C]+\n", ["Ѐӿ", "ABCЀ"], ["D", "é"]),
        ("root ::= [-д]{1,2} [д-]\n", ["-д-", "д-"], ["b-", "-л"]),
        ("root ::= k0 # [д-я]\nk0 ::= [д-я]{0,1000}\n", ["", "я" * 1000], ["я" * 1001, "a"]),
    ],
)
def test_a_class_says_what_it_said(text, taken, refused):
    grammar = vocabulary()[0].compile(text)
    for each in taken + refused:
        state = grammar.state()
        assert all(map(state.accept, [*each.encode(), END])) == (each in taken), each


def test_what_cannot_be_read_is_left_as_it_is():
    for text in ("root ::= [я-д] [\\dд] [д\n", 'root ::= "[д-я]" # [д-я]\n', "root[x=д] ::= [a-z]\n"):
        assert truthful(text) == text
