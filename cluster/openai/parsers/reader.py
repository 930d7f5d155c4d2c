"""Reads the text of one choice character by character, however it is cut, and sorts it into content and calls.

The second half reads JSON as it arrives: strict, without building anything, and with a bound on its depth (RFC 8259).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

Step = Generator[None, None, None]
MakeId = Callable[[], str]
MAX_DEPTH = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_NUMBER = frozenset("+-.eE0123456789")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\n\r")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


@dataclass(slots=True)
class CallDelta:
    """What is new in one call. `id` and `name` come with its first delta only, the arguments piece by piece.

    arguments: JSON text as the model wrote it; the pieces of one call join to one object, unless the output ended
    within it or the model wrote no valid JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is new in one choice: content to show, then calls."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One call of an answer that is not streamed."""

    id: str
    name: str
    arguments: str


def merged(calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Return what is new in each call as one piece, in the order of the calls; the deltas are taken over."""
    found: list[CallDelta] = []
    for _, group in groupby(calls, lambda call: call.index):
        first, *more = group
        if more:
            first.arguments = "".join([first.arguments, *[call.arguments for call in more]])
        found.append(first)
    return tuple(found)


def joined(parts: Iterable[Parsed]) -> tuple[str, list[WholeCall]]:
    """Return the content and the calls of a whole answer, from its deltas in order."""
    content: list[str] = []
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for part in parts:
        content.append(part.content)
        for call in part.calls:
            if call.id is not None and call.name is not None:
                heads.append((call.id, call.name))
                arguments.append([])
            arguments[call.index].append(call.arguments)
    calls = [WholeCall(*head, "".join(text)) for head, text in zip(heads, arguments, strict=True)]
    return "".join(content), calls


class MalformedCallError(Exception):
    """The text is not the call that it seemed to be; never leaves the parser."""


class Sink(Enum):
    """Where the characters go that are read: shown, kept until it is clear what they are, or to the open call."""

    CONTENT = auto()
    HELD = auto()
    ARGUMENTS = auto()


class Reader:
    """The text read so far and where it went. Nothing is lost: what is held comes out as content unless dropped.

    Its reading methods are generators that yield where they need more text; the parser resumes them with each delta.
    """

    def __init__(self, make_id: MakeId) -> None:
        self.ended = False
        self.num_calls = 0
        self._make_id = make_id
        self._text = ""
        self._position = 0
        self._flushed = 0  # characters of _text that went to a sink
        self._sink = Sink.CONTENT
        self._held: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def add(self, text: str) -> None:
        """Take more text; everything before was read."""
        self._text = self._text[self._flushed :] + text
        self._position -= self._flushed
        self._flushed = 0

    def take(self) -> Parsed:
        """Return what was sorted since the last call."""
        self._flush()
        found = Parsed("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return found

    def turn(self, sink: Sink) -> None:
        """Send what is read from here on to `sink`."""
        self._flush()
        self._sink = sink

    def release(self) -> None:
        """Show what is held, and what follows."""
        self.turn(Sink.CONTENT)
        self._content += self._held
        self._held = []

    def drop(self) -> None:
        """Forget what is held: it was the writing of a call, which is sent in another form. Holding goes on."""
        self.turn(Sink.HELD)
        self._held = []

    def mark(self) -> int:
        """Return a mark behind what is held, for `since`; good until something is released or dropped."""
        self._flush()
        return len(self._held)

    def since(self, mark: int) -> str:
        """Return what was held since `mark`."""
        self._flush()
        return "".join(self._held[mark:])

    def open_call(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        """Tell a call; what is held was the beginning of its writing. call_id: None = a new one is made."""
        self.drop()
        self._calls.append(CallDelta(self.num_calls, call_id or self._make_id(), name, arguments))
        self.num_calls += 1

    @property
    def at_end(self) -> bool:
        """Whether everything was read and no more comes."""
        return self.ended and self._position >= len(self._text)

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it, "" at the end of the text."""
        while self._position >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def advance(self, count: int = 1) -> None:
        """Read characters that are known to be there."""
        self._position += count

    def skip_until(self, find: Callable[[str, int], int]) -> None:
        """Read on to where `find(text, start)` says, within the text that is there."""
        self._position = find(self._text, self._position)

    def literal(self, wanted: str) -> Step:
        """Read exactly `wanted`; at the first other character, which is not read, raise `MalformedCallError`."""
        for letter in wanted:
            if (yield from self.peek()) != letter:
                raise MalformedCallError
            self.advance()

    def space(self) -> Step:
        """Read any whitespace."""
        while (yield from self.peek()).isspace():
            self.advance()

    def _flush(self) -> None:
        piece = self._text[self._flushed : self._position]
        self._flushed = self._position
        if not piece:
            return
        if self._sink is Sink.CONTENT:
            self._content.append(piece)
        elif self._sink is Sink.HELD:
            self._held.append(piece)
        elif self._calls and self._calls[-1].index == self.num_calls - 1:
            self._calls[-1].arguments += piece
        else:
            self._calls.append(CallDelta(self.num_calls - 1, arguments=piece))


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
