"""Gemma 4: thinking in a channel, calls whose arguments are like JSON with bare keys and quotes of their own.

Sources: Google's page on Gemma 4's prompt format; vLLM's page on its `gemma4` parsers.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from cluster.openai.parsers.reader import MalformedCallError, Reader, Step
from cluster.openai.parsers.reasoning import ReasoningParser
from cluster.openai.parsers.tagged_formats import text_until
from cluster.openai.parsers.tool_formats import read_word
from cluster.openai.parsers.tool_parser import MarkedParser, value_of_json, written

QUOTE = '<|"|>'
DEEPEST = 64  # arguments within arguments
BARE = re.compile(r"[^,:{}\[\]<\s]")  # in a key, a number or a word


class Gemma4ReasoningParser(ReasoningParser):
    """Gemma 4 thinks in `<|channel>thought ... <channel|>`, where it is asked to."""

    opening = "<|channel>thought"
    closing = "<channel|>"


class Gemma4ToolParser(MarkedParser):
    """`<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1,KEY:[true,{KEY:null}]}<tool_call|>`, one call after another.

    The words between bars are special tokens. A call is sent once its end is read.
    """

    markers = ("<|tool_call>",)

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        yield from reader.literal("call:")
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.space()
        arguments = yield from _read_object(reader, 0)
        reader.open_call(name, written(arguments))
        if not self.one_more():
            return
        yield from reader.space()
        if (yield from reader.peek()):
            yield from reader.literal("<tool_call|>")
        reader.drop()


def _read_value(reader: Reader, depth: int) -> Generator[None, None, Any]:
    yield from reader.space()
    first = yield from reader.peek()
    if depth > DEEPEST:
        raise MalformedCallError
    if first == "<":
        return (yield from _read_quoted(reader))
    if first == "{":
        return (yield from _read_object(reader, depth))
    if first == "[":
        return (yield from _read_list(reader, depth))
    text = yield from _read_bare(reader)
    try:
        return value_of_json(text)
    except ValueError as error:
        raise MalformedCallError from error


def _read_object(reader: Reader, depth: int) -> Generator[None, None, dict[str, Any]]:
    found: dict[str, Any] = {}
    yield from reader.literal("{")
    yield from reader.space()
    while (yield from reader.peek()) != "}":
        if found:
            yield from reader.literal(",")
            yield from reader.space()
        quoted = (yield from reader.peek()) == "<"
        key = (yield from _read_quoted(reader)) if quoted else (yield from _read_bare(reader))
        yield from reader.space()
        yield from reader.literal(":")
        found[key] = yield from _read_value(reader, depth + 1)
        yield from reader.space()
    yield from reader.literal("}")
    return found


def _read_list(reader: Reader, depth: int) -> Generator[None, None, list[Any]]:
    found: list[Any] = []
    yield from reader.literal("[")
    yield from reader.space()
    while (yield from reader.peek()) != "]":
        if found:
            yield from reader.literal(",")
        found.append((yield from _read_value(reader, depth + 1)))
        yield from reader.space()
    yield from reader.literal("]")
    return found


def _read_quoted(reader: Reader) -> Generator[None, None, str]:
    yield from reader.literal(QUOTE)
    return (yield from text_until(reader, QUOTE))


def _read_bare(reader: Reader) -> Generator[None, None, str]:
    mark = reader.mark()
    while BARE.fullmatch((yield from reader.peek())):
        reader.advance()
    text = reader.since(mark)
    if not text:
        raise MalformedCallError
    return text
