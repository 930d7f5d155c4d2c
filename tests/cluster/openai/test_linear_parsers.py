"""What reads a model's text costs as much for each character whatever it is: twice the text, twice the CPU.

Adversarial is what has to be held back, looked through again, or could be read in many ways.
"""

import gc
from collections.abc import Callable
from functools import partial
from itertools import accumulate, cycle, pairwise, product, takewhile
from time import process_time
from typing import Any

import pytest

from cluster.anthropic.message_blocks import chat_of
from cluster.anthropic.message_input import parse_messages
from cluster.anthropic.message_output import MessageWriter
from cluster.config_values import REASONING_PARSERS, TOOL_PARSERS
from cluster.openai.call import build_requests
from cluster.openai.choices import Choice, Delta, TokenUsage
from cluster.openai.fields import Hints
from cluster.openai.parsers.reader import joined
from cluster.openai.parsers.reasoning import AnswerParser, Qwen3Parser
from cluster.openai.parsers.tool_formats import ArgumentsParser, HermesParser, ListedParser, ListParser
from cluster.token_source import TokenChunk
from engine.text.detokenizer import StopStrings, TextDecoders, TextStream, WindowDecoder
from tests import tiny_tokenizer
from tests.long import long
from tests.openai_app import served_model

LENGTH = 200_000  # characters, tokens, or blocks
MOST = 3  # times the CPU for twice the length; 4 is quadratic
LEAST = 0.005  # seconds of CPU below which a clock tells nothing
TRIES = 5
# At each `¦` something that is repeated may begin.
JSON = '{"a": ¦1, "b": "¦x"}'
SECTION = "<｜tool▁calls▁begin｜>¦<｜tool▁call▁begin｜>"
LISTED = '[{"name": "¦f", ¦"arguments": ' + JSON + "}¦, "
TOOLS = {
    "deepseek_v3": SECTION + "function<｜tool▁sep｜>f\n```json\n" + JSON + "\n```¦<｜tool▁call▁end｜>\n",
    "deepseek_v31": SECTION + "f<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>",
    "gemma4": '<|tool_call>call:f{¦a:<|"|>¦x<|"|>,b:[1,¦{c:null}]}¦<tool_call|>',
    "glm45": "<tool_call>f\n<arg_key>¦a</arg_key>¦\n<arg_value>¦1</arg_value>¦\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "f", ¦"arguments": ' + JSON + "}¦\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>¦<|tool_call_begin|>functions.f:¦0<|tool_call_argument_begin|>"
    + JSON + "<|tool_call_end|>",
    "llama3_json": '<|python_tag|>{"name": "f", ¦"parameters": ' + JSON + "}¦; ",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">¦\n<parameter name="¦a">¦1</parameter>¦\n</invoke>\n',
    "mistral": "[TOOL_CALLS]¦f[CALL_ID]¦abc[ARGS]" + JSON,
    "openai": "<|channel|>commentary to=functions.f ¦<|constrain|>json<|message|>" + JSON + "<|call|>",
    "pythonic": '<|python_start|>[f(¦a="¦x", b=[1, ¦{"c": None}])¦, ',
    "qwen3_coder": "<tool_call>\n<function=f>¦\n<parameter=¦a>\n¦1\n</parameter>¦\n</function>\n</tool_call>",
    ListedParser: LISTED,
    ListParser: LISTED,
    ArgumentsParser: JSON,
}  # fmt: skip
REASONING = {
    "deepseek_r1": "<think>¦\nhm¦</think>¦\n\nTwo",
    "gemma4": "<|channel>thought¦\nhm ¦<channel|>¦ Two.",
    "openai_gptoss": "<|start|>assistant to=f¦<|channel|>analysis¦ to=g <|constrain|>json¦<|message|>¦hm, <|end|>¦"
    "<|start|>assistant<|channel|>final<|message|>",
}
REPEATED = (" ", "[", '"', "\\ud800", "7", "x <", '"a":1,', "a:1,a=1,", '{"a":')
SHARE = 40  # `make test` runs one case in so many, and what each parser is made for


def cases(samples) -> list[Any]:
    """Each parser behind each beginning of its sample with each thing repeated, in pieces and whole."""
    found, number = [], 0
    for name, sample in samples.items():
        plain, parts = sample.replace("¦", ""), sample.split("¦")
        begins = ["".join(parts[:place]) for place in range(len(parts))]
        for begin, repeated in [("", plain), ("", plain[: len(plain) // 2]), *product(begins, REPEATED)]:
            for whole in (False, True):
                number += 1
                case = (name, begin, repeated, whole)
                found.append(case if number % SHARE == 0 or (repeated == plain and not whole) else long(*case))
    return found


def repeating(begin: str, repeated: str, whole: bool, length: int) -> list[str]:
    """A text of that length, whole or in pieces of 1 to 16 characters."""
    text = (begin + repeated * (length // len(repeated) + 1))[:length]
    if whole:
        return [text]
    cuts = [0, *takewhile(lambda at: at < length, accumulate(cycle(range(1, 17)))), length]
    return [text[start:end] for start, end in pairwise(cuts)]


def assert_linear(run: Callable[[Any], object], of: Callable[[int], Any]) -> None:
    """Assert that `run` takes at most `MOST` times the CPU for `of(LENGTH)` that it takes for half of it.

    The least of a few tries counts: other processes use the same caches.
    """
    short = whole = float("inf")
    for _ in range(TRIES):
        short, whole = (min(best, cpu(run, of(size))) for best, size in ((short, LENGTH // 2), (whole, LENGTH)))
        if whole <= MOST * max(short, LEAST):
            return
    pytest.fail(f"{LENGTH // 2:,} took {short:.3f} s of CPU, twice as many {whole:.3f} s")


def cpu(run: Callable[[Any], object], given: Any) -> float:
    """Seconds of CPU that `run` takes, without the collector of garbage, which looks through what is not its own."""
    gc.disable()
    try:
        began = process_time()
        run(given)
        return process_time() - began
    finally:
        gc.enable()


def call_tools(kind, text: list[str]) -> None:
    parser = kind({"f"})
    joined([*map(parser.feed, text), parser.finish()])


def think(kind, text: list[str]) -> None:
    parser = kind()
    for piece in text:
        parser.feed(piece)
    parser.finish()


@pytest.mark.parametrize(("name", "begin", "repeated", "whole"), cases(TOOLS))
def test_calls_are_found(name, begin, repeated, whole):
    kind = TOOL_PARSERS.load(name) if isinstance(name, str) else name
    assert_linear(partial(call_tools, kind), partial(repeating, begin, repeated, whole))


MANY_BLANKS = [
    ("deepseek_r1", "<think>hm", " ", False),
    ("deepseek_r1", "", " ", False),
    ("openai_gptoss", "", f"<|channel|>analysis{' ' * 350}<|message|><|end|>", False),
]


@pytest.mark.parametrize(("name", "begin", "repeated", "whole"), [*cases(REASONING), *MANY_BLANKS])
def test_thinking_is_found(name, begin, repeated, whole):
    assert_linear(partial(think, REASONING_PARSERS.load(name)), partial(repeating, begin, repeated, whole))


BYTE_LEVEL = tiny_tokenizer.byte_level()
DECODERS = TextDecoders(BYTE_LEVEL)
STOPS = ["ab" * 100 + "c", "a" * 255 + "b", "\n\n", "b" * 7]


@pytest.mark.parametrize("text", ["ab", "b ", "a" * 254 + "c", "é"])
def test_stop_strings_are_found(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids

    def run(tokens: list[int]) -> None:
        stream = TextStream(DECODERS.decoder(True), StopStrings(STOPS))
        for token in tokens:
            stream.push((token,))
        stream.flush()

    assert_linear(run, lambda size: (ids * size)[:size])


class MidCharacter:
    """A tokenizer whose tokens end within a character."""

    def decode(self, ids, skip_special_tokens=True):
        return b"".join([b"\x82\xac \xe2"] * len(ids)).decode(errors="replace")


@pytest.mark.parametrize(("backend", "token"), [(BYTE_LEVEL, 0), (BYTE_LEVEL, 10**6), (MidCharacter(), 0)])
def test_tokens_are_decoded_in_a_window(backend, token):
    """Special tokens, unknown ones, and those after which no character is complete."""

    def run(tokens: list[int]) -> None:
        decoder = WindowDecoder(backend, True)
        text = "".join([*[decoder.feed((one,)) for one in tokens], decoder.finish()])
        assert text == backend.decode(tokens)

    assert_linear(run, lambda size: [token] * (size // 10))


@pytest.mark.parametrize("text", [" ", "a", "<think>x</think>", TOOLS["hermes"].replace("¦", "")])
def test_a_chunk_of_many_tokens_is_taken(text):
    """As a router gets it that goes on with another's answer."""
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids

    def run(chunk: TokenChunk) -> None:
        parser = AnswerParser(Qwen3Parser(), HermesParser({"f"}))
        Choice(0, TextStream(DECODERS.decoder(True)), None, parser).take(chunk)

    assert_linear(run, lambda size: TokenChunk(0, (ids * size)[: size // 8]))


def test_messages_are_written_and_read(tmp_path):
    """Blanks between blocks, and a conversation of many small thoughts that a client sends back."""
    model = served_model(tmp_path)
    asked = parse_messages({"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}, model)
    (request,) = build_requests(asked.call, model)

    def write(deltas: list[Delta]) -> None:
        writer = MessageWriter(asked, request, "demo")
        for delta in deltas:
            writer.add(delta)
        writer.end(TokenUsage(1, len(deltas), None))

    assert_linear(write, lambda size: [Delta(0, " ", ())] * size)
    assert_linear(
        lambda blocks: chat_of([{"role": "assistant", "content": blocks}], None, Hints(), True),
        lambda size: [{"type": "thinking", "thinking": "x" * 40}] * (size // 4),
    )
