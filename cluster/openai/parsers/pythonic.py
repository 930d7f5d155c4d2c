"""Calls written as Python: `[weather(city="Oslo", days=2), now()]`.

Sources: Meta's pages on the prompt formats of Llama 3.2 and 4; vLLM's page on tool calling.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from typing import Any

from cluster.openai.parsers.reader import MAX_DEPTH, MalformedCallError, Reader, Sink, Step, read_comma
from cluster.openai.parsers.tool_formats import read_word
from cluster.openai.parsers.tool_parser import ToolParser, read_content, written

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_PLAIN = re.compile(r"""[^'"()\[\]{}\\]+""")
_JSON_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """A list of calls as the whole answer: Llama 3.2 and 4, Gemma 3. A call is sent once its end is read.

    An answer that is no such list, or calls an unknown function first, is content. Arguments are literals by name.
    """

    opening, ending = "<|python_start|>", "<|python_end|>"  # Llama 4's, special tokens that need not be there

    def read(self, reader: Reader) -> Step:
        """See `ToolParser.read`."""
        reader.turn(Sink.HELD)
        try:
            yield from reader.space()
            if (yield from reader.peek()) == "<":
                yield from reader.literal(self.opening)
                yield from reader.space()
            yield from reader.literal("[")
            while True:
                yield from reader.space()
                yield from self._read_call(reader)
                if not self.one_more():
                    return
                if not (yield from read_comma(reader)):
                    break
            yield from reader.literal("]")
            reader.drop()
            yield from reader.space()
            if (yield from reader.peek()) == "<":
                yield from reader.literal(self.ending)
                reader.drop()
            elif not (yield from reader.peek()):
                reader.drop()
        except MalformedCallError:
            pass  # what is held was no call: it is shown below
        reader.release()
        yield from read_content(reader)

    def _read_call(self, reader: Reader) -> Step:
        mark = reader.mark()
        name = yield from read_word(reader)
        if name not in self.names:
            raise MalformedCallError
        yield from _read_brackets(reader, "(")
        reader.open_call(name, written(arguments_of(reader.since(mark)[len(name) :])))


def _read_brackets(reader: Reader, opening: str) -> Generator[None, None, None]:
    """Read from an opening bracket to the one that closes it; brackets in strings do not count."""
    yield from reader.literal(opening)
    awaited = [_CLOSING[opening]]
    while awaited:
        letter = yield from reader.peek()
        if not letter or (letter in ")]}" and letter != awaited[-1]) or len(awaited) > MAX_DEPTH:
            raise MalformedCallError
        if letter in ("'", '"'):
            yield from _read_string(reader, letter)
            continue
        if letter in _CLOSING:
            awaited.append(_CLOSING[letter])
        elif letter == awaited[-1]:
            awaited.pop()
        reader.advance()
        if awaited:
            reader.skip_until(_end_of_plain)


def _read_string(reader: Reader, quote: str) -> Step:
    reader.advance()
    while (letter := (yield from reader.peek())) != quote:
        if not letter or letter == "\n":
            raise MalformedCallError
        reader.advance()
        if letter == "\\":
            if not (yield from reader.peek()):
                raise MalformedCallError
            reader.advance()
    reader.advance()


def _end_of_plain(text: str, start: int) -> int:
    found = _PLAIN.match(text, start)
    return found.end() if found else start


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments that are written in brackets, by name.

    Raises `MalformedCallError` for what is no literal, or has no name.
    """
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise MalformedCallError
        found = {word.arg: _value_of(word.value) for word in call.keywords if word.arg is not None}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError from error
    if len(found) < len(call.keywords):  # f(**more), or a name twice
        raise MalformedCallError
    return found


def _value_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key_of(key): _value_of(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value_of(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    raise MalformedCallError


def _key_of(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedCallError
