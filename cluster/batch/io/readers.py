"""Rows of files in each format: lines of JSON, text or CSV; Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import closing
from io import BufferedIOBase
from typing import Any

import msgspec

from cluster.batch.errors import InputError
from cluster.batch.io.paths import InputFile
from cluster.batch.io.reading import BOM, Line, extra_library, open_bytes, read_lines
from cluster.batch.rows import SourceRow, quoted

_object = msgspec.json.Decoder(dict[str, Any]).decode
COLUMN = "text"
MAX_NAMES = 100  # of columns that a message names
_encode = msgspec.json.Encoder().encode
BATCH_ROWS = 256
BATCH_BYTES = 64 << 20  # of values, in as many rows as are decoded at once


def read_json_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield a row per line that is not blank, numbered from `first`; a line that is no object has a problem."""
    with open_bytes(file) as data:
        for number, line in enumerate(read_lines(data, limit), start=first):
            if number == first and file.suffix == ".json":
                _refuse_whole(file, line)
            yield _json_row(file, line, number, limit)


def _json_row(file: InputFile, line: Line, number: int, limit: int) -> SourceRow:
    place = f"{file.name}:{line.number}"
    if line.too_long:
        return SourceRow(number, place, None, line.text, f"the line is longer than {limit} bytes", line.number)
    try:
        return SourceRow(number, place, _object(line.text), line.text, line=line.number)
    except (ValueError, RecursionError) as error:
        return SourceRow(number, place, None, line.text, f"the line is no JSON object: {error}", line.number)


def _refuse_whole(file: InputFile, line: Line) -> None:
    """Raise `InputError` when the whole file is one JSON value: its lines would all be reported as bad rows."""
    text = line.text.strip()
    if text.startswith(b"[") or text == b"{":
        raise InputError(
            f"{file.name}: a JSON object per line is read, and this is one value over many lines; make it so: "
            "jq -c '.[]' data.json > data.jsonl"
        )


def read_text_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield a row per line that is not blank, numbered from `first`: its column `text`, the prompt, is the line."""
    with open_bytes(file) as data:
        for number, line in enumerate(read_lines(data, limit), start=first):
            yield _text_row(f"{file.name}:{line.number}", line, number, limit)


def _text_row(place: str, line: Line, number: int, limit: int) -> SourceRow:
    if line.too_long:
        return SourceRow(number, place, None, line.text, f"the line is longer than {limit} bytes")
    try:
        return SourceRow(number, place, {COLUMN: line.text.decode()}, line.text, prompt_column=COLUMN)
    except UnicodeDecodeError as error:
        return SourceRow(number, place, None, line.text, f"the line is not UTF-8: {error}")


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


def read_parquet_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the rows of a Parquet file, numbered from `first`; a row group at a time is in memory, as in the file.

    A value that the file holds once for many rows is there once in memory too, besides in the row that is read. Bytes
    that are UTF-8 become text. limit: bytes that a row may have as JSON.
    """
    for number, record in enumerate(_parquet(file), start=first):
        fields = {name: _text(value) for name, value in record.items()}
        yield _row(f"{file.name} row {number - first + 1}", fields, number, limit)


def _row(place: str, fields: Mapping[str, Any], number: int, limit: int) -> SourceRow:
    try:
        raw = msgspec.json.encode(fields, enc_hook=str)
    except (TypeError, ValueError, RecursionError) as error:
        return SourceRow(number, place, None, repr(fields).encode(), f"the row holds what is no JSON: {error}")
    if len(raw) > limit:
        return SourceRow(number, place, None, raw, f"the row is longer than {limit} bytes")
    return SourceRow(number, place, fields, raw)


def _parquet(file: InputFile) -> Iterator[dict[str, Any]]:
    library = extra_library("pyarrow.parquet", file.name)
    with open_bytes(file) as data:
        try:
            known = library.read_metadata(data)
            data.seek(0)
            with closing(library.ParquetFile(data, metadata=known, read_dictionary=_texts(known.schema))) as table:
                for batch in table.iter_batches(batch_size=_rows_at_once(known)):
                    columns = list(zip(batch.schema.names, batch.columns, strict=True))
                    for row in range(batch.num_rows):
                        yield {name: column[row].as_py() for name, column in columns}
        except ValueError as error:  # ArrowInvalid is one
            raise InputError(f"{file.name} is damaged, or not what its name says: {error}") from error


def _texts(schema: Any) -> list[str]:
    """Paths of the columns whose values can be of any length."""
    columns = [schema.column(index) for index in range(len(schema))]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _rows_at_once(known: Any) -> int:
    """Return how many rows of the row group with the longest ones are decoded together."""
    groups = [known.row_group(index) for index in range(known.num_row_groups)]
    longest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, longest))))


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value
