"""Reads JSON as it arrives: strict, without building anything, and with a bound on its depth.

Source: RFC 8259.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from cluster.openai.tools.reader import MalformedCallError, Reader, Step

MAX_DEPTH = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_NUMBER = frozenset("+-.eE0123456789")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\n\r")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


def read_space(reader: Reader) -> Step:
    """Read JSON's whitespace."""
    while (yield from reader.peek()) in _SPACE:
        reader.advance()


def read_value(reader: Reader, depth: int = 0) -> Step:
    """Read one value; raises `MalformedCallError` at the first character that cannot be, which is not read."""
    first = yield from reader.peek()
    if first == "{":
        yield from read_members(reader, depth)
    elif first == "[":
        yield from _read_items(reader, depth)
    elif first == '"':
        yield from read_string(reader)
    elif first in ("t", "f", "n"):
        yield from reader.literal({"t": "true", "f": "false", "n": "null"}[first])
    else:
        yield from _read_number(reader)


def read_members(reader: Reader, depth: int) -> Step:
    """Read an object."""
    _check_depth(depth)
    yield from reader.literal("{")
    yield from read_space(reader)
    if (yield from reader.peek()) != "}":
        while True:
            yield from read_string(reader)
            yield from read_colon(reader)
            yield from read_value(reader, depth + 1)
            if not (yield from read_comma(reader)):
                break
    yield from reader.literal("}")


def read_colon(reader: Reader) -> Step:
    """Read the colon after a key and the space around it."""
    yield from read_space(reader)
    yield from reader.literal(":")
    yield from read_space(reader)


def read_comma(reader: Reader) -> Generator[None, None, bool]:
    """Read the comma after a value, if there is one, and the space around it; return whether there was."""
    yield from read_space(reader)
    if (yield from reader.peek()) != ",":
        return False
    reader.advance()
    yield from read_space(reader)
    return True


def read_string(reader: Reader) -> Step:
    """Read a string."""
    yield from reader.literal('"')
    while True:
        letter = yield from reader.peek()
        if letter == '"':
            reader.advance()
            return
        if letter == "\\":
            yield from _read_escape(reader)
        elif letter < " ":  # control characters, and the end of the text
            raise MalformedCallError
        else:
            reader.skip_until(_end_of_plain)


def _end_of_plain(text: str, start: int) -> int:
    found = _PLAIN.match(text, start)
    return found.end() if found else start


def _read_escape(reader: Reader) -> Step:
    yield from reader.literal("\\")
    letter = yield from reader.peek()
    if letter == "u":
        reader.advance()
        for _ in range(4):
            if (yield from reader.peek()) not in _HEX:
                raise MalformedCallError
            reader.advance()
    elif letter in _ESCAPED:
        reader.advance()
    else:
        raise MalformedCallError


def _read_items(reader: Reader, depth: int) -> Step:
    _check_depth(depth)
    yield from reader.literal("[")
    yield from read_space(reader)
    if (yield from reader.peek()) != "]":
        while True:
            yield from read_value(reader, depth + 1)
            if not (yield from read_comma(reader)):
                break
    yield from reader.literal("]")


def _read_number(reader: Reader) -> Step:
    letters: list[str] = []
    while (letter := (yield from reader.peek())) in _IN_NUMBER:
        letters.append(letter)
        reader.advance()
    if not _NUMBER.fullmatch("".join(letters)):
        raise MalformedCallError


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise MalformedCallError
