"""What tool parsers share: an interface, calls behind markers, and the object that most formats write a call as."""

from __future__ import annotations

import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from random import Random, SystemRandom
from typing import Any, ClassVar, NoReturn

from cluster.openai.parsers.reader import (
    MalformedCallError,
    Parsed,
    Reader,
    Sink,
    Step,
    read_colon,
    read_comma,
    read_members,
    read_space,
    read_string,
    read_value,
)

MakeCallId = Callable[[Random], str]
_ARGUMENTS = frozenset({"arguments", "parameters"})  # Llama 3 says parameters, all others arguments
_HALF_PAIR = re.compile("[\ud800-\udfff]")
NO_ARGUMENTS = "{}"


def call_id(chance: Random) -> str:
    """Return a new id as OpenAI makes them."""
    return "call_" + chance.randbytes(12).hex()


def short_call_id(chance: Random) -> str:
    """Return a new id as Mistral's chat templates want them: nine letters and digits."""
    return "".join(chance.choices(string.ascii_letters + string.digits, k=9))


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes calls, so that a grammar can: what stands around the arguments, and around the calls.

    begin: `NAME` stands for the function's name.
    """

    begin: str
    end: str
    opening: str = ""
    between: str = ""
    closing: str = ""


class ToolParser(ABC):
    """Finds the calls in the text of one choice, whole or in deltas: however it is cut, the result is the same.

    names: the functions that may be called. parallel: False = the choice is complete after one call, and what the
    model writes after it is dropped. chance: what ids are drawn from. bound: a grammar allows calls, or an answer
    in JSON, so a call that the end of the text cuts is no content. make_id: how ids are made, where it is not as
    this format has them. What looks like a call and is none comes out as content; whitespace between calls and at
    their ends does not. A call whose arguments turn out malformed was already told in part: it stays, with
    arguments that are no JSON, and the rest of the text is content.

    schemas: of the functions' arguments, for formats that do not write JSON; set by who makes the parser.
    markers: what the format is recognised by. Where one is a special token of the model, it must not be skipped when
    text is made of tokens (see `shows_special_tokens`). form: how calls are written where a grammar lets the model
    choose between a call and an answer in JSON; None = as `ListedParser` reads them.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[CallForm | None] = None
    make_id: ClassVar[MakeCallId] = staticmethod(call_id)

    def __init__(
        self,
        names: Collection[str],
        *,
        parallel: bool = True,
        chance: Random | None = None,
        bound: bool = False,
        make_id: MakeCallId | None = None,
    ) -> None:
        self.bound = bound
        self.names = frozenset(names)
        self.schemas: Mapping[str, Mapping[str, Any] | None] = {}
        self._parallel = parallel
        self._reader = Reader(partial(make_id or type(self).make_id, chance or SystemRandom()))
        self._run = self._read_all()
        self._done = False

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        return self._reader.num_calls

    @property
    def done(self) -> bool:
        """Whether the one call that is allowed is complete: the choice needs no more tokens."""
        return self._done

    def feed(self, text: str) -> Parsed:
        """Return what `text` brings; the last characters may be held back until more is known."""
        self._reader.add(text)
        self._resume()
        return self._reader.take()

    def finish(self) -> Parsed:
        """Return what is left at the end of the text."""
        self._reader.ended = True
        self._resume()
        return self._reader.take()

    @abstractmethod
    def read(self, reader: Reader) -> Step:
        """Read the text to its end, or to the end of the one call that is allowed."""

    def one_more(self) -> bool:
        """Whether another call is allowed."""
        return self._parallel or not self.num_calls

    def _read_all(self) -> Step:
        reader = self._reader
        yield from self.read(reader)
        self._done = not reader.ended
        while True:
            reader.turn(Sink.HELD)
            reader.skip_until(_everything)
            reader.drop()
            yield

    def _resume(self) -> None:
        for _ in self._run:
            return


class MarkedParser(ToolParser):
    """A text in which every call, or every list of calls, stands behind a marker.

    marker: the one that was read last.
    """

    marker: str = ""

    @cached_property
    def _plain(self) -> re.Pattern[str]:
        """Text in which no marker begins."""
        firsts = "".join(sorted({re.escape(marker[0]) for marker in self.markers}))
        return re.compile(rf"[^\s{firsts}]+")

    def read(self, reader: Reader) -> Step:
        """See `ToolParser.read`."""
        while self.one_more() and (yield from self._next_marker(reader)):
            try:
                yield from self.read_calls(reader)
            except MalformedCallError:
                self._show(reader)
                if not self.one_more():
                    yield from read_content(reader)

    @abstractmethod
    def read_calls(self, reader: Reader) -> Step:
        """Read what follows a marker; raises `MalformedCallError` before the first character that does not fit."""

    def _next_marker(self, reader: Reader) -> Generator[None, None, bool]:
        """Show the text up to the next marker; hold the marker and the space before it. False = no more."""
        while True:
            reader.turn(Sink.HELD)
            yield from reader.space()
            if not (yield from reader.peek()):
                if self.num_calls:
                    reader.drop()
                reader.release()
                return False
            try:
                yield from self._marker(reader)
            except MalformedCallError:
                self._show(reader)
                reader.skip_until(self._end_of_plain)
            else:
                return True

    def _show(self, reader: Reader) -> None:
        """Show what is held and is no call, unless it is the beginning of one."""
        if self.bound and reader.at_end:
            reader.drop()
        reader.release()

    def _marker(self, reader: Reader) -> Step:
        fitting, read = self.markers, ""
        while read not in fitting:
            character = yield from reader.peek()
            read += character
            fitting = tuple(marker for marker in fitting if marker.startswith(read))
            if not fitting or not character:
                raise MalformedCallError
            reader.advance()
        self.marker = read

    def _end_of_plain(self, text: str, start: int) -> int:
        found = self._plain.match(text, start)
        return found.end() if found else start


def read_content(reader: Reader, sink: Sink = Sink.CONTENT) -> Step:
    """Show the rest of the text, or send it elsewhere."""
    reader.turn(sink)
    while (yield from reader.peek()):
        reader.skip_until(_everything)


def _everything(text: str, _: int) -> int:
    return len(text)


class CallObject:
    """Reads one call. It is sent as soon as its name and the beginning of its arguments are read.

    names: functions that may be called; an object with another name is no call. Keys beside name and arguments (`id`,
    `type`) are passed over. forced: the text can be nothing but calls, so where it ends within one, that is a call
    too once its name is read.
    """

    def __init__(self, reader: Reader, names: Collection[str], *, forced: bool = False) -> None:
        self._reader = reader
        self._names = names
        self._forced = forced
        self._name: str | None = None
        self._arguments: str | None = None  # those that came before the name
        self._told = False
        self._whole = False

    def read(self) -> Step:
        """Read the object; raises `MalformedCallError` at the first character that does not belong to a call."""
        reader = self._reader
        reader.turn(Sink.HELD)
        cut = False
        try:
            yield from self._members()
        except MalformedCallError:
            cut = reader.at_end and self._forced
            if not (cut or (self._whole and reader.at_end)):  # only the closing brace is missing
                raise
        if self._name is None and not cut:
            raise MalformedCallError
        if self._name is not None and not self._told:
            reader.open_call(self._name, self._arguments or ("" if cut else NO_ARGUMENTS))
        reader.drop()

    def _members(self) -> Step:
        reader = self._reader
        yield from reader.literal("{")
        yield from read_space(reader)
        while True:
            key = yield from self._string()
            yield from read_colon(reader)
            yield from self._member(key)
            if not (yield from read_comma(reader)):
                break
        yield from reader.literal("}")

    def _member(self, key: str) -> Step:
        if key == "name" and self._name is None:
            self._name = yield from self._string()
            if self._name not in self._names:
                raise MalformedCallError
        elif key in _ARGUMENTS and self._arguments is None and not self._told:
            yield from self._read_arguments()
        else:
            yield from read_value(self._reader, depth=1)

    def _read_arguments(self) -> Step:
        reader = self._reader
        if self._name is None or (yield from reader.peek()) != "{":
            self._arguments = _as_object((yield from self._value()))
            return
        reader.open_call(self._name)
        self._told = True
        yield from read_arguments(reader)
        self._whole = True

    def _string(self) -> Generator[None, None, str]:
        mark = self._reader.mark()
        yield from read_string(self._reader)
        text: str = json.loads(self._reader.since(mark))
        return text

    def _value(self) -> Generator[None, None, str]:
        mark = self._reader.mark()
        yield from read_value(self._reader, depth=1)
        return self._reader.since(mark)


def read_arguments(reader: Reader) -> Step:
    """Read an object as the arguments of the call that was opened last, and hold what follows."""
    reader.turn(Sink.ARGUMENTS)
    yield from read_members(reader, 0)
    reader.turn(Sink.HELD)


def value_of_json(text: str) -> Any:
    """Return a value; raises `ValueError` or `RecursionError` for what is none, or what Python cannot hold and write.

    That is a number beyond a float's, or an integer of thousands of digits; NaN is no JSON.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def written(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON that is text: half a surrogate pair is written as the escape that it was.

    Raises `MalformedCallError` for numbers that cannot be written.
    """
    try:
        return _escaped(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error


def _escaped(text: str) -> str:
    """Return JSON with an escape for each half of a surrogate pair, which no encoding has."""
    return _HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    if isfinite(number := float(text)):
        return number
    raise ValueError(f"{text[:20]} is more than a float holds")


def _as_object(text: str) -> str:
    """Some models write null for no arguments, and some the object as a string."""
    if text.startswith("{"):
        return text
    if text == "null":
        return NO_ARGUMENTS
    if text.startswith('"') and len(text) < 2**16:
        inner: str = json.loads(text)
        try:
            if isinstance(value_of_json(inner), dict):
                return _escaped(inner)
        except (ValueError, RecursionError):
            pass  # reported below: it is no object either way
    raise MalformedCallError
