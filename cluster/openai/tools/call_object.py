"""Reads `{"name": ..., "arguments": {...}}`, the object that most formats write a call as."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator

from cluster.openai.tools.json_text import (
    read_colon,
    read_comma,
    read_members,
    read_space,
    read_string,
    read_value,
)
from cluster.openai.tools.reader import MalformedCallError, Reader, Sink, Step

_ARGUMENTS = frozenset({"arguments", "parameters"})  # Llama 3 says parameters, all others arguments
NO_ARGUMENTS = "{}"


class CallObject:
    """Reads one call. It is told as soon as its name and the beginning of its arguments are read.

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
        start = len(self._reader.held())
        yield from read_string(self._reader)
        text: str = json.loads(self._reader.held()[start:])
        return text

    def _value(self) -> Generator[None, None, str]:
        start = len(self._reader.held())
        yield from read_value(self._reader, depth=1)
        return self._reader.held()[start:]


def read_arguments(reader: Reader) -> Step:
    """Read an object as the arguments of the call that was opened last, and hold what follows."""
    reader.turn(Sink.ARGUMENTS)
    yield from read_members(reader, 0)
    reader.turn(Sink.HELD)


def _as_object(text: str) -> str:
    """Some models write null for no arguments, and some the object as a string."""
    if text.startswith("{"):
        return text
    if text == "null":
        return NO_ARGUMENTS
    inner = json.loads(text) if text.startswith('"') else None
    try:
        if len(text) < 2**16 and inner and isinstance(json.loads(inner), dict):
            return str(inner)
    except (ValueError, RecursionError):
        pass  # told below: it is no object either way
    raise MalformedCallError
