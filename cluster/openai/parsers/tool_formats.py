"""The formats in which families of models write calls.

Sources: chat templates of Hermes 2 Pro, Qwen 2.5 and 3, Llama 3.1, Mistral v3 to v13, DeepSeek V3 and V3.1, Kimi K2;
OpenAI's page on the harmony format; vLLM's pages on tool calling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from random import Random
from typing import ClassVar

from cluster.openai.parsers.reader import MalformedCallError, Reader, Sink, Step, read_comma, read_space
from cluster.openai.parsers.tool_parser import (
    CallForm,
    CallObject,
    MarkedParser,
    ToolParser,
    read_arguments,
    read_content,
    short_call_id,
)

_IN_NAME = re.compile(r"[a-zA-Z0-9_.-]")


class HermesParser(MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, and many fine-tunes."""

    markers = ("<tool_call>",)
    closing = "</tool_call>"
    form = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from read_space(reader)
        yield from CallObject(reader, self.names, forced=self.bound).read()
        if not self.one_more():
            return
        yield from reader.space()
        if (yield from reader.peek()):
            yield from reader.literal(self.closing)
        reader.drop()


class MistralParser(MarkedParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and of later models `[TOOL_CALLS]name[ARGS]{...}`.

    The list is that of tokenizers v3 to v7; v11 writes `[CALL_ID]` and an id between name and `[ARGS]`. All these
    words are special tokens: text without them (`skip_special_tokens`) holds no call that could be found.
    """

    markers = ("[TOOL_CALLS]",)
    make_id: ClassVar[Callable[[Random], str]] = staticmethod(short_call_id)

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from read_list(reader, self)
        else:
            yield from self._read_named(reader)

    def _read_named(self, reader: Reader) -> Step:
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            reader.advance()
            if (yield from reader.peek()) == "C":
                yield from reader.literal("CALL_ID]")
                yield from read_word(reader)
                yield from reader.literal("[")
            yield from reader.literal("ARGS]")
            yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedCallError
        reader.open_call(name)
        yield from read_arguments(reader)


class DeepSeekV31Parser(MarkedParser):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, all calls in one section: DeepSeek V3.1.

    All words between bars are special tokens.
    """

    markers = ("<｜tool▁calls▁begin｜>",)
    same, begin, last = "<｜tool▁call", "▁begin｜>", "s▁end｜>"  # both go on from `same`
    separator, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    kind, fence, unfence = "", "", ""  # what V3 writes around name and arguments

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        yield from reader.literal(self.same)
        while True:
            yield from reader.literal(self.begin)
            yield from self._read_call(reader)
            if not self.one_more() or not (yield from self._more(reader)):
                return
            yield from reader.literal(self.same)
            if (yield from reader.peek()) == self.last[0]:
                yield from reader.literal(self.last)
                reader.drop()
                return

    def _read_call(self, reader: Reader) -> Step:
        if self.kind:
            yield from reader.literal(self.kind + self.separator)
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.literal(self.fence or self.separator)
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedCallError
        reader.open_call(name)
        yield from read_arguments(reader)

    def _more(self, reader: Reader) -> Generator[None, None, bool]:
        """Pass over what ends a call. False = the text ends here."""
        for word in (self.unfence, self.end, ""):
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.drop()
                return False
            yield from reader.literal(word)
        return True


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The same with the word `function` before the name, and arguments between fences: DeepSeek V3 and R1."""

    kind, fence, unfence = "function", "\n```json", "```"


class KimiK2Parser(MarkedParser):
    """`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2.

    All calls stand in one section. What the model writes before the arguments is the call's id, which its chat
    template writes again. All words between bars are special tokens.
    """

    markers = ("<|tool_calls_section_begin|>",)
    prefix = "functions."

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        yield from reader.space()
        yield from reader.literal("<|tool_call")
        if (yield from reader.peek()) != "_":
            raise MalformedCallError
        while (yield from reader.peek()) == "_":
            yield from reader.literal("_begin|>")
            yield from self._read_call(reader)
            if not self.one_more():
                return
            for word in ("<|tool_call_end|>", "<|tool_call"):
                yield from reader.space()
                if not (yield from reader.peek()):
                    reader.drop()
                    return
                yield from reader.literal(word)
        yield from reader.literal("s_section_end|>")
        reader.drop()

    def _read_call(self, reader: Reader) -> Step:
        yield from reader.space()
        yield from reader.literal(self.prefix)
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.literal(":")
        index = yield from read_word(reader)
        yield from reader.space()
        yield from reader.literal("<|tool_call_argument_begin|>")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedCallError
        reader.open_call(name, call_id=f"{self.prefix}{name}:{index}")
        yield from read_arguments(reader)


class GptOssToolParser(MarkedParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`: gpt-oss (harmony).

    The words between bars are special tokens. `GptOssParser` takes what stands before the call.
    """

    markers = ("<|channel|>commentary to=functions.",)

    def read_calls(self, reader: Reader) -> Step:
        """See `MarkedParser.read_calls`."""
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from reader.space()
        yield from reader.literal("<|")
        if (yield from reader.peek()) == "c":
            yield from reader.literal("constrain|>json<|")
        yield from reader.literal("message|>")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedCallError
        reader.open_call(name)
        yield from read_arguments(reader)
        if not self.one_more():
            return
        yield from reader.space()
        if (yield from reader.peek()):
            yield from reader.literal("<|call|>")
        reader.drop()


class Llama3JsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, after `<|python_tag|>` or not; more after `;`.

    An object that names no function of the request is content, so that answers in JSON stay what they are. The
    marker is a special token, but calls are found without it.
    """

    marker = "<|python_tag|>"
    form = CallForm('{"name": "NAME", "parameters": ', "}", between="; ")

    def read(self, reader: Reader) -> Step:
        """See `ToolParser.read`."""
        reader.turn(Sink.HELD)
        try:
            yield from reader.space()
            if (yield from reader.peek()) == "<":
                yield from reader.literal(self.marker)
                yield from reader.space()
            while True:
                yield from CallObject(reader, self.names).read()
                if not self.one_more():
                    return
                if not (yield from self._another(reader)):
                    return
        except MalformedCallError:
            reader.release()
        yield from read_content(reader)

    def _another(self, reader: Reader) -> Generator[None, None, bool]:
        yield from reader.space()
        if (yield from reader.peek()) == ";":
            reader.advance()
            yield from reader.space()
        if (yield from reader.peek()):
            return True
        reader.drop()
        return False


class ListedParser(ToolParser):
    """A list of calls and nothing else, or content: the model may write either."""

    form = CallForm('{"name": "NAME", "arguments": ', "}", opening="[", between=", ", closing="]")
    forced = False

    def read(self, reader: Reader) -> Step:
        """See `ToolParser.read`."""
        reader.turn(Sink.HELD)
        try:
            yield from reader.space()
            yield from read_list(reader, self, forced=self.forced)
            if not self.one_more():
                return
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.drop()
        except MalformedCallError:
            if self.forced and self.num_calls:
                yield from read_content(reader, Sink.ARGUMENTS)
        reader.release()
        yield from read_content(reader)


class ListParser(ListedParser):
    """A list of calls and nothing else: what the grammar of `tool_choice` "required" allows.

    A list that is cut has no content: what was written of it is sent as calls, or not at all. Nor has one that is
    nested deeper than calls are read: its rest belongs to the call that is so deep.
    """

    forced = True


class ArgumentsParser(ToolParser):
    """The arguments of one call and nothing else: what the grammar of a named `tool_choice` allows.

    names: the one function that is called, if only with the beginning of its arguments.
    """

    def read(self, reader: Reader) -> Step:
        """See `ToolParser.read`."""
        reader.turn(Sink.HELD)
        try:
            yield from reader.space()
            first = yield from reader.peek()
            if first not in ("{", ""):
                raise MalformedCallError
            (name,) = self.names
            reader.open_call(name)
            yield from read_arguments(reader)
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.drop()
        except MalformedCallError:
            if self.num_calls:
                yield from read_content(reader, Sink.ARGUMENTS)  # nested too deeply to be read
        reader.release()
        yield from read_content(reader)


def read_list(reader: Reader, parser: ToolParser, *, forced: bool = False) -> Step:
    """Read a JSON list of calls, of one where more are not allowed. forced: the text can be nothing else."""
    yield from reader.literal("[")
    yield from read_space(reader)
    while True:
        yield from CallObject(reader, parser.names, forced=forced).read()
        if not parser.one_more():
            return
        if not (yield from read_comma(reader)):
            break
    if (yield from reader.peek()):
        yield from reader.literal("]")
    reader.drop()


def read_word(reader: Reader) -> Generator[None, None, str]:
    """Return the name of a function, or another word, that comes next; "" where there is none."""
    mark = reader.mark()
    while _IN_NAME.fullmatch((yield from reader.peek())):
        reader.advance()
    return reader.since(mark)
