"""Tables of rows: JSON lines, CSV, and what all of them share."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from cluster.batch.output.drafts import Sink

_encode = msgspec.json.Encoder().encode


class Table(Protocol):
    """A table that is being written, row by row."""

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a row; columns that it lacks are empty."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class JsonTable:
    """A JSON object per line."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a line, with the columns that this row has."""
        self._sink.write(_encode(columns) + b"\n")

    def close(self) -> None:
        """Nothing is left."""


RECORD_END = "\r\n"  # for csv: it quotes what holds either, as every reader wants it


class CsvTable:
    """CSV, RFC 4180 but for line ends, which are those of Unix. names: of the columns, in order."""

    def __init__(self, sink: Sink, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._writer = csv.writer(_Text(sink), lineterminator=RECORD_END)
        self._writer.writerow(self._names)

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a record; what is no text is written as JSON, and nothing as nothing."""
        self._writer.writerow([text_of(columns.get(name)) for name in self._names])

    def close(self) -> None:
        """Nothing is left."""


def text_of(value: Any) -> str | None:
    """Return a value as text: itself, or its JSON. None stays None."""
    return value if value is None or isinstance(value, str) else _encode(value).decode()


class _Text:
    """What csv writes to."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, text: str) -> None:
        """Take in a record."""
        self._sink.write(text.removesuffix(RECORD_END).encode() + b"\n")
