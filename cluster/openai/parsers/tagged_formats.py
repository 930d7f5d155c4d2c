"""Formats that write each argument of a call between tags, as plain text: the tool's schema says what it stands for.

Sources: chat templates of GLM-4.5, MiniMax M2 and Qwen3-Coder; vLLM's pages on tool calling.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from cluster.openai.parsers.reader import MalformedCallError, Reader, Step
from cluster.openai.parsers.tool_formats import read_word
from cluster.openai.parsers.tool_parser import MarkedParser, value_of_json, written

Arguments = dict[str, Any]
WORDS = {"true": True, "false": False, "null": None, "none": None}  # as they, or as Python writes them


class TaggedParser(MarkedParser):
    """Calls behind `<tool_call>` whose arguments are tagged. A call is sent once its end is read."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def typed(self, name: str, key: str, text: str) -> Any:
        """Return what an argument's text stands for, by the parameters of the function `name`."""
        schema = self.schemas.get(name) or {}
        properties = schema.get("properties")
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        return value_of(text, declared if isinstance(declared, Mapping) else {})

    def send(self, reader: Reader, name: str, arguments: Arguments) -> None:
        """Send a call whose end was read."""
        reader.open_call(name, written(arguments))


class Glm45Parser(TaggedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`: GLM-4.5 to 4.7."""

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        arguments: Arguments = {}
        while True:
            yield from reader.space()
            yield from reader.literal("<")
            if (yield from reader.peek()) == "/":
                break
            yield from reader.literal("arg_key>")
            key = yield from text_until(reader, "</arg_key>")
            yield from reader.space()
            yield from reader.literal("<arg_value>")
            arguments[key] = self.typed(name, key, (yield from text_until(reader, "</arg_value>")))
        yield from reader.literal("/tool_call>")
        self.send(reader, name, arguments)


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder.

    The model leaves `<tool_call>` out at times.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        if self.marker == "<tool_call>":
            yield from reader.space()
            yield from reader.literal("<function=")
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.literal(">")
        arguments: Arguments = {}
        while True:
            yield from reader.space()
            yield from reader.literal("<")
            if (yield from reader.peek()) == "/":
                break
            yield from reader.literal("parameter=")
            key = yield from text_until(reader, ">")
            text = yield from text_until(reader, "</parameter>")
            arguments[key] = self.typed(name, key, text.removeprefix("\n").removesuffix("\n"))
        yield from reader.literal("/function>")
        self.send(reader, name, arguments)
        if not self.one_more():
            return
        yield from reader.space()
        if (yield from reader.peek()):
            yield from reader.literal("</tool_call>")
        reader.drop()


class MiniMaxM2Parser(TaggedParser):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...`: MiniMax M2."""

    markers: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        yield from reader.literal("<")
        if (yield from reader.peek()) == "/":
            raise MalformedCallError
        while (yield from reader.peek()) != "/":
            yield from self._read_call(reader)
            if not self.one_more():
                return
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.drop()
                return
            yield from reader.literal("<")
        yield from reader.literal("/minimax:tool_call>")
        reader.drop()

    def _read_call(self, reader: Reader) -> Step:
        yield from reader.literal('invoke name="')
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.literal('">')
        arguments: Arguments = {}
        while True:
            yield from reader.space()
            yield from reader.literal("<")
            if (yield from reader.peek()) == "/":
                break
            yield from reader.literal('parameter name="')
            key = yield from text_until(reader, '">')
            arguments[key] = self.typed(name, key, (yield from text_until(reader, "</parameter>")))
        yield from reader.literal("/invoke>")
        self.send(reader, name, arguments)


def text_until(reader: Reader, word: str) -> Generator[None, None, str]:
    """Return the text up to `word`, and read that too; its first character is not in it again.

    Raises `MalformedCallError` where the text ends before it.
    """
    mark = reader.mark()
    while (yield from reader.peek()):
        reader.skip_until(lambda text, at: found if (found := text.find(word[0], at)) >= 0 else len(text))
        try:
            yield from reader.literal(word)
        except MalformedCallError:
            continue
        return reader.since(mark)[: -len(word)]
    raise MalformedCallError


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """Return what a text stands for where `schema` is declared for it: a string, or a value of JSON.

    A text that is no such value stays a string; so the client sees what the model wrote.
    """
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    if types and types <= {"string"}:
        return text
    bare = text.strip()
    if bare.lower() in WORDS:
        return WORDS[bare.lower()]
    try:
        found = value_of_json(bare)
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and isinstance(found, str) else found
