"""Rows of CSV files, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import BufferedIOBase

import msgspec

from cluster.batch.errors import InputError
from cluster.batch.rows import SourceRow, quoted
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.lines import BOM
from cluster.batch.sources.reading import open_bytes

MAX_NAMES = 100  # of columns that a message tells
_encode = msgspec.json.Encoder().encode


def read_csv_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield a row per record, numbered from `first`; all values are text. limit: bytes that a record may have.

    A record with too few or too many columns, or bad quotes, has a problem. Raises `InputError` for a header that
    does not name each column once, and for a record without end.
    """
    csv.field_size_limit(max(limit, csv.field_size_limit()))  # the process's; a prompt may be longer than 128 KiB
    with open_bytes(file) as data:
        records = _Records(file, data, limit)
        header = records.header()
        number = first
        for record in records:
            yield records.row(header, record, number)
            number += 1


class _Records:
    """Iterates over the records of a file: lists of columns, or the text of what is wrong with one."""

    def __init__(self, file: InputFile, data: BufferedIOBase, limit: int) -> None:
        self._file = file
        self._lines = _TextLines(file, data, limit)
        self._reader = csv.reader(self._lines, strict=True)
        self._place = ""

    def header(self) -> list[str]:
        """Return the names of the columns."""
        names = next(self, [])
        if isinstance(names, str):
            raise InputError(f"{self._place}: {names}")
        if "" in names or len(set(names)) < len(names):
            has = ", ".join(map(quoted, names[:MAX_NAMES]))
            raise InputError(f"{self._place}: the first line must name each column once, and it has {has}")
        return names

    def row(self, header: list[str], record: list[str] | str, number: int) -> SourceRow:
        """Return a record as a row."""
        if isinstance(record, str):
            return SourceRow(number, self._place, None, self._lines.record, record)
        if len(record) != len(header):
            problem = f"it has {len(record)} columns, and the first line names {len(header)}"
            return SourceRow(number, self._place, None, _encode(record), problem)
        fields = dict(zip(header, record, strict=True))
        return SourceRow(number, self._place, fields, _encode(fields))

    def __iter__(self) -> Iterator[list[str] | str]:
        return self

    def __next__(self) -> list[str] | str:
        record: list[str] = []
        while not record:  # blank lines
            self._lines.begin()
            try:
                record = next(self._reader)
            except csv.Error as error:
                self._place = f"{self._file.name}:{self._lines.begun}"
                return f"it is no CSV: {error}"
        self._place = f"{self._file.name}:{self._lines.begun}"
        return record if self._lines.is_utf8 else "it is not UTF-8"


class _TextLines:
    """The lines of a file as csv wants them. begun: line at which the record began."""

    def __init__(self, file: InputFile, data: BufferedIOBase, limit: int) -> None:
        self._file = file
        self._data = data
        self._limit = limit
        self._number = 0
        self.begin()

    def begin(self) -> None:
        """A record begins."""
        self.begun = self._number + 1
        self._bytes = bytearray()
        self.is_utf8 = True

    @property
    def record(self) -> bytes:
        """Bytes of the record so far."""
        return bytes(self._bytes)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._data.readline(self._limit + 1 - len(self._bytes))
        if not line:
            raise StopIteration
        self._number += 1
        self._bytes += line
        if len(self._bytes) > self._limit:
            raise InputError(
                f"{self._file.name}:{self.begun}: this record has no end within {self._limit} bytes; close the "
                "quotes of its last column, or write JSON lines"
            )
        if self._number == 1:
            line = line.removeprefix(BOM)
        return self._text(line)

    def _text(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.is_utf8 = False
            return line.decode(errors="replace")
