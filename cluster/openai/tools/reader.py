"""Reads the text of one choice character by character, however it is cut, and sorts it into content and calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto

from cluster.openai.tools.deltas import CallDelta, Parsed

Step = Generator[None, None, None]
MakeId = Callable[[], str]


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
        """Forget what is held: it was the writing of a call, which is told otherwise. Holding goes on."""
        self.turn(Sink.HELD)
        self._held = []

    def held(self) -> str:
        """Return what is held."""
        self._flush()
        self._held = ["".join(self._held)]
        return self._held[0]

    def open_call(self, name: str, arguments: str = "") -> None:
        """Tell a call; what is held was the beginning of its writing."""
        self.drop()
        self._calls.append(CallDelta(self.num_calls, self._make_id(), name, arguments))
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
