"""Calls whose arguments stand between tags as text: what they stand for, and that the cutting changes nothing."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.parsers.gemma4 import Gemma4ToolParser
from cluster.openai.parsers.reader import joined
from cluster.openai.parsers.tagged_formats import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser, value_of
from cluster.openai.parsers.tool_choice import ToolUse
from cluster.openai.parsers.tool_formats import KimiK2Parser

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string"},
        "days": {"type": "array"},
        "exact": {"type": "boolean"},
        "most": {"type": ["integer", "null"]},
    },
}
TOOLS = {"weather": SCHEMA, "now": None}
CALLED = {"city": "Köln <x> & y", "code": "50667", "days": [1, {"a": "</b>"}], "exact": True, "most": None}
WRITTEN = {"city": "Köln <x> & y", "code": "50667", "days": '[1, {"a": "</b>"}]', "exact": "True", "most": "null"}


def glm(name, arguments):
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def coder(name, arguments):
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def minimax(name, arguments):
    pairs = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>'


def kimi(name, arguments):
    """Not tagged, but cut in the same ways."""
    values = {key: value_of(text, SCHEMA["properties"][key]) for key, text in arguments.items()}
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(values, ensure_ascii=False)}<|tool_call_end|><|tool_calls_section_end|>"
    )


def gemma(name, arguments):
    """Not tagged, but sent when whole, too."""

    def written(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json.dumps(value)

    values = {key: value_of(text, SCHEMA["properties"][key]) for key, text in arguments.items()}
    return f"<|tool_call>call:{name}{written(values)}<tool_call|>"


KINDS = [
    (Glm45Parser, glm),
    (Qwen3CoderParser, coder),
    (MiniMaxM2Parser, minimax),
    (KimiK2Parser, kimi),
    (Gemma4ToolParser, gemma),
]


def parsed(kind, pieces, parallel=True):
    parser = ToolUse("auto", TOOLS, kind, parallel).new_parser()
    content, calls = joined([*[parser.feed(piece) for piece in pieces], parser.finish()])
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("kind", "written"), KINDS)
def test_arguments_are_of_the_types_that_the_schema_declares(kind, written):
    text = "Let me look.\n" + written("weather", WRITTEN) + "\n" + written("now", {})
    assert parsed(kind, [text]) == ("Let me look.", [("weather", CALLED), ("now", {})])
    assert parsed(kind, [text], parallel=False) == ("Let me look.", [("weather", CALLED)])


@pytest.mark.parametrize(("kind", "written"), KINDS)
def test_a_text_of_more_lines_stays_as_it_is(kind, written):
    code = "def f(x):\n    return x < 2\n\n"
    assert parsed(kind, [written("weather", {"code": code})]) == ("", [("weather", {"code": code})])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("None", {"type": "object"}, None),
        ("NaN", {"type": "number"}, "NaN"),
        ('"5"', {"type": ["string", "null"]}, '"5"'),
        ("[" * 5000, {}, "[" * 5000),
    ],
)
def test_what_a_text_stands_for(text, schema, value):
    assert value_of(text, schema) == value


@pytest.mark.parametrize(("kind", "written"), KINDS)
@pytest.mark.parametrize("text", ["unknown", "", "now"])
def test_what_is_no_call_is_content(kind, written, text):
    broken = written("unknown", {}) if text == "unknown" else f"{kind.markers[0]}{text}"
    assert parsed(kind, [broken]) == (broken, [])


PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "now", "weather", "<arg_key>", "</arg_key>", "<arg_value>"),
            *(
                "</arg_value>",
                "<function=",
                ">",
                "<parameter=",
                "</parameter>",
                "</function>",
                "city",
                "\n",
                "<",
                "1",
            ),
            *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>"),
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.now:0", "<|tool_call_argument_begin|>{}"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            *(
                "<|tool_call>call:now{",
                "<|tool_call>",
                "call:weather{place:",
                '<|"|>',
                "}<tool_call|>",
                "{",
                "[",
                "a:1,",
            ),
        ]
    ),
    max_size=12,
)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("kind", "written"), KINDS)
@given(data=st.data())
def test_however_a_text_is_cut_its_parts_are_the_same(kind, written, parallel, data):
    calls = written("weather", WRITTEN) + written("now", {}) + " and"
    text = data.draw(st.one_of(PIECES.map("".join), st.just(calls)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    expected = parsed(kind, [text], parallel)
    assert parsed(kind, pieces, parallel) == parsed(kind, text, parallel) == expected
    if not expected[1]:
        assert expected[0] == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MiniMaxM2Parser, "<minimax:tool_call></minimax:tool_call>"),
        (KimiK2Parser, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        (Qwen3CoderParser, "a <function=unknown>\n</function>"),
    ],
)
def test_what_holds_no_call_is_content(kind, text):
    assert parsed(kind, text) == (text, [])


def test_qwen3_coder_may_leave_the_opening_tag_out():
    text = "Let me look.\n\n" + coder("weather", WRITTEN).replace("<tool_call>", "").lstrip()
    assert parsed(Qwen3CoderParser, text) == parsed(Qwen3CoderParser, "Let me look.\n\n" + coder("weather", WRITTEN))
    assert parsed(Qwen3CoderParser, text)[1]
