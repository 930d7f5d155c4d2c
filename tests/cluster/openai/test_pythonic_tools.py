"""Calls written as Python: what they stand for, what is none, and that the cutting changes nothing."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.parsers.pythonic import PythonicParser
from cluster.openai.parsers.reader import joined

NAMES = {"weather", "now", "a.b-c"}
CALLS = """[weather(city='Oslo, "N"', days=[1, -2.5, {"a": (None, True, false)}], note="(\\n)]"), now()]"""
MEANT = [
    ("weather", {"city": 'Oslo, "N"', "days": [1, -2.5, {"a": [None, True, False]}], "note": "(\n)]"}),
    ("now", {}),
]


def parsed(pieces, parallel=True):
    parser = PythonicParser(NAMES, parallel=parallel)
    content, calls = joined([*[parser.feed(piece) for piece in pieces], parser.finish()])
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("text", [CALLS, f"  {CALLS}\n", f"<|python_start|>{CALLS}<|python_end|>"])
def test_calls_are_read_with_the_values_that_python_gives_their_arguments(text):
    assert parsed([text]) == ("", MEANT)
    assert parsed([text], parallel=False) == ("", MEANT[:1])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[]",
            "[1, 2]",
            "weather()",
            "[unknown()]",
            "[weather",
            "[weather(",
            "[weather(city='Oslo'",
            "Hello [now()]",
        ),
        *(
            "[weather('Oslo')]",
            "[weather(**x)]",
            "[weather(city=open('x'))]",
            "[weather(a=1, a=2)]",
            "[now(x=1e999)]",
        ),
        *(
            "[now(x=b'1')]",
            "[now(x={1: 2})]",
            "[now(x=(1]))]",
            "[now(x='a\nb')]",
            "[now(x=-True)]",
            "[now(x=f'{y}')]",
        ),
        "[now(x=" + "[" * 5000,
        "[now(x=" + "-" * 100_000 + "1)]",
        "[now(x=" + "9" * 5000 + ")]",
    ],
)
def test_what_is_no_call_is_content(text):
    assert parsed([text]) == (text, [])


def test_what_follows_the_calls_is_content():
    assert parsed(["[now()] and more"]) == (" and more", [("now", {})])
    assert parsed(["[now(), unknown()]"]) == (", unknown()]", [("now", {})])


PIECES = st.lists(st.sampled_from(["[", "]", "now", "(", ")", "x=", "'", '"', "1", ",", " ", "\\", "{", "}", "<|"]))


@pytest.mark.parametrize("parallel", [True, False])
@given(data=st.data())
def test_however_a_text_is_cut_its_parts_are_the_same(parallel, data):
    text = data.draw(st.one_of(PIECES.map("".join), st.just(CALLS), st.just(f"<|python_start|>{CALLS} x")))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    expected = parsed([text], parallel)
    assert parsed(pieces, parallel) == parsed(text, parallel) == expected
    if not expected[1]:
        assert expected[0] == text
