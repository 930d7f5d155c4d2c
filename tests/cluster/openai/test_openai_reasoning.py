"""Thinking told from answer, whole and in streams, for models that open it themselves and for those that do not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from cluster.config_values import REASONING_PARSERS
from cluster.openai.choices import Choice
from cluster.openai.parsers.gemma4 import Gemma4ReasoningParser
from cluster.openai.parsers.reasoning import AnswerParser, DeepSeekR1Parser, GptOssParser, Qwen3Parser
from cluster.openai.parsers.tool_choice import ToolUse
from cluster.openai.parsers.tool_formats import GptOssToolParser
from cluster.token_source import TokenChunk
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer


def parsed(parser, pieces):
    deltas = [*[parser.feed(piece) for piece in pieces], parser.finish()]
    return "".join(one.reasoning for one in deltas), "".join(one.content for one in deltas)


BOTH = [DeepSeekR1Parser, Qwen3Parser]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("text", ["<think>\nhm, 1 < 2\n</think>\n\nTwo.\n", "\n<think>hm, 1 < 2</think>Two.\n"])
def test_thinking_is_apart_from_the_answer_without_tags_and_the_space_around_them(kind, text):
    assert parsed(kind(), [text]) == ("hm, 1 < 2", "Two.\n")


def test_only_models_that_always_think_need_no_opening_tag():
    text = "hm\n</think>\n\nTwo."
    assert parsed(DeepSeekR1Parser(), [text]) == ("hm", "Two.")
    assert parsed(Qwen3Parser(), [text]) == ("", text)


HARMONY = "<|channel|>analysis<|message|>hm, 1 < 2<|end|><|start|>assistant<|channel|>final<|message|>Two."


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HARMONY, ("hm, 1 < 2", "Two.")),
        ("<|channel|>final<|message|>Two.", ("", "Two.")),
        ("Two <|channel|>", ("", "Two <|channel|>")),
        ("<|channel|>analysis<|message|>hm", ("hm", "")),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f<|message|>{}",
            ("hm", "<|channel|>commentary to=functions.f<|message|>{}"),
        ),
        # As OpenAI's chat template writes calls of earlier turns, which models imitate.
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
            "<|message|>{}<|call|>",
            ("hm", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            ("", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ),
        (
            "<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
            ("", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ),
        # A preamble, which users are shown, thinking in two parts, and an answer of a type.
        (
            "<|channel|>analysis<|message|>a <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>",
            ("a\nb", "I look.\n{}"),
        ),
        ("<|channel|>final<|message|>a <|end|><|start|>assi", ("", "a ")),
        ("<|channel|>final<|message|>1 <| 2", ("", "1 <| 2")),
        ("<|channel|>no head", ("", "<|channel|>no head")),
        ("<|channel|>analysis", ("", "")),
        ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>Two.", ("hm", "Two.")),
        ("<|channel|>final<|message|>", ("", "")),
    ],
)
def test_gpt_oss_thinks_and_answers_in_channels_however_the_text_is_cut(text, found):
    assert parsed(GptOssParser(), [text]) == found
    assert parsed(GptOssParser(), text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|channel>thought\nhm<channel|>Two.", ("hm", "Two.")),
        ("<|channel>thought\n<channel|>Two.", ("", "Two.")),
        ("Two.", ("", "Two.")),
    ],
)
def test_gemma_4_thinks_in_a_channel(text, found):
    assert parsed(Gemma4ReasoningParser(), [text]) == found
    assert parsed(Gemma4ReasoningParser(), text) == found


def test_calls_of_gpt_oss_are_found_behind_heads_in_every_order():
    heads = (
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    )
    text = HARMONY.partition("<|start|>")[0] + "".join(f"{head}{{}}<|call|>" for head in heads)
    for pieces in ([text], text):
        parser = AnswerParser(GptOssParser(), ToolUse("auto", {"now": None}, GptOssToolParser, True).new_parser())
        deltas = [*[parser.feed(piece) for piece in pieces], parser.finish()]
        assert "".join(delta.reasoning for delta in deltas) == "hm, 1 < 2"
        assert "".join(delta.content for delta in deltas) == ""
        assert [call.name for delta in deltas for call in delta.calls if call.name] == ["now", "now"]


def test_an_answer_without_thinking_is_content_to_the_last_character():
    text = " \n Two <think> </think> three\n"
    assert parsed(Qwen3Parser(), [text]) == ("", text)


def test_thinking_that_does_not_end_is_no_content():
    assert parsed(Qwen3Parser(), ["<think>hm, </thin"]) == ("hm, </thin", "")
    assert parsed(DeepSeekR1Parser(), ["hm, "]) == ("hm,", "")


def test_tags_after_the_thinking_are_content():
    assert parsed(Qwen3Parser(), ["<think>a</think>b<think>c</think>"]) == ("a", "b<think>c</think>")


@pytest.mark.parametrize(
    ("prompt", "within"),
    [
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("<|assistant|>", None),
        ("<think>a</think> b <|assistant|>\n", None),
    ],
)
def test_the_prompt_tells_whether_the_template_opened_or_closed_the_thinking(prompt, within):
    assert Qwen3Parser.starts_within(prompt) is within


@pytest.mark.parametrize("kind", BOTH)
def test_what_the_template_did_goes_before_what_is_usual_for_the_model(kind):
    assert parsed(kind(True), ["hm</think>Two."]) == ("hm", "Two.")
    assert parsed(kind(False), ["<think>x</think>Two."]) == ("", "<think>x</think>Two.")


def test_a_stream_shows_thinking_as_it_comes_and_holds_only_what_may_be_a_tag():
    parser = Qwen3Parser()
    assert parser.feed("<th").reasoning == ""
    assert parser.feed("ink>one").reasoning == "one"
    assert parser.within
    assert parser.feed(" two <").reasoning == " two"
    assert parser.feed("/think>").reasoning == ""
    assert not parser.within
    assert parser.feed("\nA").content == "A"


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", "<", ">", " ", "\n", "hm", "ü🙂", "/"]),
    max_size=14,
)


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("kind", BOTH)
@given(pieces=PIECES)
def test_however_a_text_is_cut_its_parts_are_the_same(kind, thinking, pieces):
    text = "".join(pieces)
    expected = parsed(kind(thinking), [text])
    assert parsed(kind(thinking), pieces) == expected
    assert parsed(kind(thinking), text) == expected
    assert parsed(kind(thinking), [text[i : i + 3] for i in range(0, len(text), 3)]) == expected


def test_parsers_are_known_by_name():
    assert REASONING_PARSERS.names() == ("deepseek_r1", "gemma4", "glm45", "minimax_m2", "openai_gptoss", "qwen3")
    with pytest.raises(ConfigError, match="known: deepseek_r1, gemma4, glm45, minimax_m2, openai_gptoss, qwen3"):
        REASONING_PARSERS.load("r1")


def test_special_tokens_are_kept_where_the_tags_are_some(tmp_path):
    backend = tiny_tokenizer.byte_level()
    backend.add_special_tokens([AddedToken("<think>", special=True)])
    assert Qwen3Parser.keeps_special_tokens(Tokenizer(str(tiny_tokenizer.save(backend, tmp_path / "a"))))
    plain = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path / "b")
    assert not Qwen3Parser.keeps_special_tokens(Tokenizer(str(plain)))


def taken(tokenizer, ids, cuts):
    """Run a choice over its tokens in pieces; returns what it told, and its tokens of thinking."""
    parser = AnswerParser(Qwen3Parser())
    choice = Choice(0, tokenizer.text_streams(SamplingParams())[0], parser=parser)
    pieces = [ids[a:b] for a, b in pairwise([0, *sorted(cuts), len(ids)]) if a < b]
    deltas = [
        choice.take(TokenChunk(0, tuple(piece), finish_reason="length" if piece is pieces[-1] else None))
        for piece in pieces
    ]
    told = ("".join(one.reasoning for one in deltas), "".join(one.text for one in deltas), deltas[-1].finish_reason)
    return told, choice.reasoning_tokens, choice.num_tokens


def test_tokens_of_thinking_are_counted_alike_however_they_come(tmp_path):
    tokenizer = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)))
    ids = tokenizer.encode("<think>one, two</think>And three.")
    whole = taken(tokenizer, ids, [])
    assert whole[0] == ("one, two", "And three.", "length")
    assert 0 < whole[1] < whole[2] == len(ids)
    for cut in range(1, len(ids)):
        assert taken(tokenizer, ids, [cut]) == whole
    assert taken(tokenizer, ids, range(1, len(ids))) == whole
