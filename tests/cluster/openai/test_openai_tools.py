"""Calls found in models' text: the formats, what is malformed, and that the cutting of a stream changes nothing."""

import itertools
import json
import re
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import parse_config
from cluster.config_values import TOOL_PARSERS
from cluster.openai.parsers.reader import joined
from cluster.openai.parsers.reasoning import AnswerParser, DeepSeekR1Parser
from cluster.openai.parsers.tool_formats import (
    ArgumentsParser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    GptOssToolParser,
    HermesParser,
    ListParser,
    Llama3JsonParser,
    MistralParser,
)
from engine.errors import ConfigError

NAMES = ("weather", "now")
WEATHER = '{"city": "Köln", "days": [1, -2.5e3], "more": {"x": "}]\\"\\u00fc"}}'
CALLED = {"city": "Köln", "days": [1, -2500.0], "more": {"x": '}]"ü'}}


def parsed(parser, pieces):
    content, calls = joined([*[parser.feed(piece) for piece in pieces], parser.finish()])
    return content, [(call.name, call.arguments) for call in calls]


def whole(kind, text, names=NAMES, **changes):
    return parsed(kind(names, **changes), [text])


TWO_CALLS = {
    HermesParser: f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    Llama3JsonParser: f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {WEATHER}}}; '
    '{"name": "now", "parameters": {}}',
    MistralParser: f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}, "id": "abcdefghi"}}, '
    '{"name": "now", "arguments": {}}]',
    DeepSeekV31Parser: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    DeepSeekV3Parser: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{WEATHER}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    GptOssToolParser: f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}<|call|>"
    "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
    ListParser: f'[{{"name": "weather", "parameters": {WEATHER}}}, {{"name": "now", "parameters": {{}}}}]',
}


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_two_calls_are_found_and_nothing_else_is_shown(kind):
    content, calls = whole(kind, TWO_CALLS[kind])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", CALLED), ("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER}[TOOL_CALLS]now{{}}",
    ],
)
def test_mistrals_newer_formats_name_the_function_before_its_arguments(text):
    content, calls = whole(MistralParser, text)
    assert (content, calls) == ("", [("weather", WEATHER), ("now", "{}")])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, 'Let me look.\n\n<tool_call>{"name": "now"}</tool_call>\n'),
        (MistralParser, 'Let me look.\n\n[TOOL_CALLS][{"name": "now"}]\n'),
        (MistralParser, "Let me look.\n\n[TOOL_CALLS]now[ARGS]{}\n"),
    ],
)
def test_what_is_said_before_a_call_is_content_without_the_space_between(kind, text):
    assert whole(kind, text) == ("Let me look.", [("now", "{}")])


@pytest.mark.parametrize("kind", [kind for kind in TWO_CALLS if kind is not ListParser])
@pytest.mark.parametrize("text", ["", "  \n", "Hello, world! ", '{"a": 1}', "a < b [1] <tool [TOOL", "x <|python"])
def test_a_text_without_calls_is_content_to_the_last_character(kind, text):
    assert whole(kind, text) == (text, [])


MALFORMED = [
    (HermesParser, '<tool_call>now()</tool_call> <tool_call>{"name": "now"'),
    (HermesParser, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "now", "arguments": "soon"}</tool_call>'),
    (HermesParser, "<tool_call>{'name': 'now'}</tool_call>"),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": 1e, "x": 01}</tool_call>'),
    (HermesParser, '<tool_call>{"x": ' + "[" * 500 + "</tool_call>"),
    (HermesParser, '<tool_call>{"name": "no\nw"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "\\q"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "\\ud800"}</tool_call>'),
    (MistralParser, "[TOOL_CALLS]"),
    (MistralParser, "[TOOL_CALLS] [1, 2]"),
    (MistralParser, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS]now[ARGS]nothing"),
    (MistralParser, "[TOOL_CALLS]now[WHAT]{}"),
    (DeepSeekV31Parser, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}"),
    (DeepSeekV31Parser, "<｜tool▁calls▁begin｜> now"),
    (DeepSeekV3Parser, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"),
    (GptOssToolParser, "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>"),
    (GptOssToolParser, "<|channel|>commentary to=functions.now<|message|>soon"),
    (GptOssToolParser, "<|channel|>final<|message|>now"),
    (Llama3JsonParser, '{"name": "Bob", "age": 3}'),
    (Llama3JsonParser, '{"parameters": {}}'),
    (ListParser, "not a list"),
    (ArgumentsParser, "not an object"),
]


@pytest.mark.parametrize(("kind", "text"), MALFORMED)
def test_a_malformed_call_comes_out_as_content_as_it_was_written(kind, text):
    names = NAMES if kind is not ArgumentsParser else ("now",)
    assert whole(kind, text, names) == (text, [])


def test_a_call_after_a_malformed_one_is_found():
    assert whole(HermesParser, '<tool_call>a<tool_call><tool_call>{"name": "now"}') == (
        "<tool_call>a<tool_call>",
        [("now", "{}")],
    )


def test_arguments_that_break_off_in_the_middle_are_told_as_far_as_they_go_and_the_rest_is_content():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Köln", }}</tool_call> sorry'
    assert whole(HermesParser, text) == ("}}</tool_call> sorry", [("weather", '{"city": "Köln", ')])


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_an_output_that_ends_within_the_arguments_is_a_call_with_what_there_is(kind):
    text = TWO_CALLS[kind]
    cut = text[: text.index('"days"')]
    assert whole(kind, cut) == ("", [("weather", '{"city": "Köln", ')])


@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_list_shows_no_content_wherever_it_is_cut(parallel):
    text = TWO_CALLS[ListParser]
    start = text.index(WEATHER)
    ends = [text.index(f'"{name}"') + len(name) + 2 for name in NAMES][: None if parallel else 1]
    for size in range(len(text) + 1):
        content, calls = whole(ListParser, text[:size], parallel=parallel)
        assert content == ""
        assert [name for name, _ in calls] == [name for name, end in zip(NAMES, ends, strict=False) if end <= size]
        assert not calls or calls[0][1] == text[start : min(size, start + len(WEATHER))]


def test_a_forced_function_is_a_call_with_what_there_is_wherever_it_is_cut():
    for size in range(len(WEATHER) + 1):
        assert whole(ArgumentsParser, WEATHER[:size], ("weather",)) == ("", [("weather", WEATHER[:size])])


def test_a_forced_call_that_is_nested_deeper_than_it_is_read_shows_no_content():
    deep = '{"a": ' * 80 + "1" + "}" * 80
    assert whole(ArgumentsParser, deep, ("now",)) == ("", [("now", deep)])
    content, calls = whole(ListParser, f'[{{"name": "now", "parameters": {deep}}}]')
    assert (content, calls) == ("", [("now", deep + "}]")])


def test_closing_braces_and_tags_that_are_missing_at_the_end_do_not_matter():
    text = '<tool_call>{"name": "now", "arguments": {"a": 1}'
    for more in ("", "}", "}\n"):
        assert whole(HermesParser, text + more) == ("", [("now", '{"a": 1}')])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [('{"a": 1}', '{"a": 1}'), ("null", "{}"), ('"{\\"a\\": 1}"', '{"a": 1}')],
)
def test_arguments_may_come_before_the_name_or_as_a_string(arguments, found):
    first = f'<tool_call>{{"arguments": {arguments}, "name": "now", "id": [7]}}</tool_call>'
    last = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert whole(HermesParser, first) == whole(HermesParser, last) == ("", [("now", found)])


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_one_call_ends_the_choice_where_more_are_not_allowed(kind):
    parser = kind(NAMES, parallel=False)
    found = parsed(parser, TWO_CALLS[kind])
    assert found == ("", [("weather", WEATHER)])
    assert parser.done


def test_a_broken_call_does_not_end_the_choice_in_silence():
    text = '<tool_call>{"name": "now", "arguments": {oh}} well'
    assert whole(HermesParser, text, parallel=False) == ("oh}} well", [("now", "{")])


def test_a_stream_tells_id_type_and_name_once_and_the_arguments_in_pieces():
    parser = HermesParser(NAMES)
    deltas = [call for piece in TWO_CALLS[HermesParser] for call in parser.feed(piece).calls]
    heads = [delta for delta in deltas if delta.name is not None]
    assert [(head.index, head.name) for head in heads] == [(0, "weather"), (1, "now")]
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", head.id) for head in heads)
    assert heads[0].id != heads[1].id
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    assert sum(delta.index == 0 for delta in deltas) > 20
    assert all(delta.id is None for delta in deltas if delta.name is None)


def test_mistrals_ids_are_as_its_templates_want_them():
    (call,) = MistralParser(NAMES).feed("[TOOL_CALLS]now[ARGS]{").calls
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call.id)


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "<tool_call>", "[", "{", '{"name": "', " "])
@pytest.mark.parametrize("kind", [kind for kind in TWO_CALLS if kind is not ListParser])
def test_a_long_text_of_one_kind_of_bracket_takes_no_longer_than_it_is_long(kind, text):
    many = text * 20_000
    content, calls = whole(kind, many)
    assert (content.strip(), calls) == (many.strip(), [])


PIECES = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "now"',
            '{"name": "weather", ', '"arguments": {', '"parameters": {"a": ', ', "arguments": "{}"', "{", "}", "}}",
            "]", "[", ",", '"', "\\", "\\u12", "now", "nul", "null", "-1", "e5", "1", " ", "\n", "ü🙂", "hello", "<",
            ":", ";", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "```", "<｜tool▁calls▁end｜>", "function", "\n```json", "<|channel|>commentary to=functions.",
            "<|message|>", "<|constrain|>json", "<|call|>",
        ]
    ),
    max_size=14,
)  # fmt: skip


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("kind", [*TWO_CALLS, ArgumentsParser])
@given(data=st.data())
def test_however_a_text_is_cut_its_parts_are_the_same(kind, parallel, data):
    text = data.draw(st.one_of(PIECES.map("".join), st.sampled_from(list(TWO_CALLS.values()))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    names = NAMES if kind is not ArgumentsParser else ("now",)
    expected = whole(kind, text, names, parallel=parallel)
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert parsed(kind(names, parallel=parallel), pieces) == expected
    assert parsed(kind(names, parallel=parallel), text) == expected


@pytest.mark.parametrize("kind", [kind for kind in TWO_CALLS if kind is not ListParser])
@given(text=PIECES.map("".join))
def test_nothing_of_a_text_without_calls_is_lost(kind, text):
    content, calls = whole(kind, text)
    if not calls:
        assert content == text


def test_parsers_are_known_by_name_and_an_unknown_one_is_told_which_there_are():
    names = (
        *(
            "deepseek_v3",
            "deepseek_v31",
            "gemma4",
            "glm45",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "minimax_m2",
            "mistral",
        ),
        *("openai", "pythonic", "qwen3_coder"),
    )
    assert TOOL_PARSERS.names() == names
    assert TOOL_PARSERS.load("hermes") is HermesParser
    with pytest.raises(ConfigError, match=f"known: {', '.join(names)}") as caught:
        TOOL_PARSERS.load("hermse")
    assert caught.value.flag == "tool_call_parser"


@pytest.fixture
def offered(monkeypatch):
    """Makes installed packages offer parsers by entry points."""

    def offer(**values):
        found = [EntryPoint(name, value, "squadron.tool_parsers") for name, value in values.items()]
        monkeypatch.setattr("cluster.config_values.entry_points", lambda group: found)

    return offer


def test_installed_packages_may_offer_parsers_under_names_of_their_own(offered):
    offered(
        mine="cluster.openai.parsers.tool_formats:ListParser", lost="cluster.openai.parsers.tool_formats:NoParser"
    )
    assert {"hermes", "llama3_json", "lost", "mine", "mistral"} <= {*TOOL_PARSERS.names()}
    assert TOOL_PARSERS.load("mine") is ListParser
    with pytest.raises(ConfigError, match="NoParser"):
        TOOL_PARSERS.load("lost")


def test_a_parser_under_a_name_that_is_taken_is_refused(offered):
    offered(hermes="cluster.openai.parsers.tool_formats:ListParser")
    with pytest.raises(ConfigError, match="'hermes', a name that is taken"):
        TOOL_PARSERS.load("mistral")


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_a_server_does_not_start_with_a_parser_that_it_does_not_have(flag):
    with pytest.raises(ConfigError, match="there is no parser 'xml'") as caught:
        parse_config({"model": "demo", flag: "xml"})
    assert caught.value.flag == flag


def test_calls_are_looked_for_in_the_answer_and_not_in_the_thinking():
    parser = AnswerParser(DeepSeekR1Parser(), HermesParser(NAMES))
    text = '<think>\nmaybe <tool_call>{"name": "now"}</tool_call>?\n</think>\n\nYes. <tool_call>{"name": "now"}'
    deltas = [*[parser.feed(piece) for piece in text], parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == 'maybe <tool_call>{"name": "now"}</tool_call>?'
    assert "".join(delta.content for delta in deltas) == "Yes."
    assert [call.name for delta in deltas for call in delta.calls if call.name] == ["now"]


def test_the_reason_is_tool_calls_where_the_model_stopped_to_call():
    parser = AnswerParser(tools=HermesParser(NAMES))
    assert parser.finish_reason("stop") == "stop"
    parser.feed('<tool_call>{"name": "now"}')
    assert (parser.finish_reason("stop"), parser.finish_reason("length")) == ("tool_calls", "length")
