"""Tables that an output is written as: JSON lines, CSV and Parquet.

The columns of a CSV or Parquet file are found by reading the input once: its rows need not agree, and all must fit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from cluster.batch.io.places import ByteSink
from cluster.batch.io.reading import extra_library
from cluster.batch.rows import InputSource

_encode = msgspec.json.Encoder().encode
RECORD_END = "\r\n"  # for csv: it quotes what holds either, as every reader wants it
BATCH_ROWS = 4096
BATCH_BYTES = 16 << 20
MAX_NESTED = 500  # fields below one column; what has more is a mapping with keys of its own in each row


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

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a line, with the columns that this row has."""
        self._sink.write(_encode(columns) + b"\n")

    def close(self) -> None:
        """Nothing is left."""


class CsvTable:
    """CSV, RFC 4180 but for line ends, which are those of Unix. names: of the columns, in order."""

    def __init__(self, sink: ByteSink, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._writer = csv.writer(_Text(sink), lineterminator=RECORD_END)
        self._writer.writerow(self._names)

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a record; what is no text is written as JSON, and nothing as nothing."""
        self._writer.writerow([text_of(columns.get(name)) for name in self._names])

    def close(self) -> None:
        """Nothing is left."""


class ParquetTable:
    """A Parquet file. types: column -> Arrow type, which all values fit; other values of text columns become JSON."""

    def __init__(self, sink: ByteSink, types: Mapping[str, Any]) -> None:
        self._arrow = arrow_library()
        self._schema = self._arrow.schema(list(types.items()))
        self._file = self._arrow.PythonFile(sink, mode="w")
        self._writer = extra_library("pyarrow.parquet", "Parquet").ParquetWriter(
            self._file, self._schema, compression="zstd"
        )
        self._texts = {name for name, kind in types.items() if self._arrow.types.is_string(kind)}
        self._rows: list[Mapping[str, Any]] = []
        self._size = 0

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a row."""
        columns = {name: text_of(value) if name in self._texts else value for name, value in columns.items()}
        self._rows.append(columns)
        self._size += sum(len(value) for value in columns.values() if isinstance(value, str | bytes | list | dict))
        if len(self._rows) == BATCH_ROWS or self._size > BATCH_BYTES:
            self._write()

    def close(self) -> None:
        """Write the last row group and the footer."""
        if self._rows:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        arrays = [self._array(field) for field in self._schema]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._size = [], 0

    def _array(self, field: Any) -> Any:
        return self._arrow.array([row.get(field.name) for row in self._rows], field.type)


def text_of(value: Any) -> str | None:
    """Return a value as text: itself, or its JSON. None stays None."""
    return value if value is None or isinstance(value, str) else _encode(value).decode()


class _Text:
    """What csv writes to."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink

    def write(self, text: str) -> None:
        """Take in a record."""
        self._sink.write(text.removesuffix(RECORD_END).encode() + b"\n")


def column_names(source: InputSource) -> list[str]:
    """Return the names of all columns, in the order in which they come."""
    names: dict[str, None] = {}
    for row in source.rows():
        names.update(dict.fromkeys(row.fields or ()))
    return list(names)


def arrow_types(source: InputSource) -> dict[str, Any]:
    """Return the Arrow type of every column that holds all its values; text, as JSON, where they have none in common.

    Reads the source once, and once more where types were widened, to see that all values fit.
    """
    survey = _Survey()
    for batch in _batches(source):
        survey.take(batch)
    types = survey.settled()
    if survey.widened:
        for batch in _batches(source):
            for name in sorted(survey.widened & types.keys()):
                if not fits([columns.get(name) for columns in batch], types[name]):
                    types[name] = survey.text
    return types


def fits(values: list[Any], kind: Any) -> bool:
    """Whether Arrow takes `values` for a column of type `kind`."""
    arrow = arrow_library()
    try:
        arrow.array(values if kind != arrow.string() else [text_of(value) for value in values], kind)
    except (arrow.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


def arrow_library() -> Any:
    """Return pyarrow. Raises `InputError` naming the extra when it is missing."""
    return extra_library("pyarrow", "Parquet")


class _Survey:
    """Types of columns, as batches of rows show them. widened: columns whose batches did not agree."""

    def __init__(self) -> None:
        self._arrow = arrow_library()
        self.text = self._arrow.string()
        self.widened: set[str] = set()
        self._types: dict[str, Any] = {}

    def take(self, batch: list[Mapping[str, Any]]) -> None:
        """Take in the values of a batch."""
        for name in dict.fromkeys(name for columns in batch for name in columns):
            found = self._inferred([columns.get(name) for columns in batch])
            before = self._types.get(name, found)
            if before != found:
                self.widened.add(name)
                found = self._common(name, before, found)
            self._types[name] = found

    def settled(self) -> dict[str, Any]:
        """Return a type for each column that a Parquet file can hold."""
        return {name: kind if self._is_storable(kind) else self.text for name, kind in self._types.items()}

    def _inferred(self, values: list[Any]) -> Any:
        try:
            return self._arrow.array(values).type
        except (self._arrow.ArrowException, OverflowError, TypeError, ValueError):
            return self.text

    def _common(self, name: str, one: Any, other: Any) -> Any:
        schemas = [self._arrow.schema([(name, kind)]) for kind in (one, other)]
        try:
            return self._arrow.unify_schemas(schemas, promote_options="permissive").field(name).type
        except self._arrow.ArrowException:
            return self.text

    def _is_storable(self, kind: Any) -> bool:
        """Whether Parquet can hold the type, which it cannot for an object without fields."""
        if self._arrow.types.is_null(kind) or _num_nested(kind) > MAX_NESTED:
            return False
        table = self._arrow.table({"column": self._arrow.array([], kind)})
        try:
            extra_library("pyarrow.parquet", "Parquet").write_table(table, self._arrow.BufferOutputStream())
        except self._arrow.ArrowException:
            return False
        return True


def _num_nested(kind: Any) -> int:
    return sum(1 + _num_nested(kind.field(at).type) for at in range(kind.num_fields))


def _batches(source: InputSource) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    size = 0
    for row in source.rows():
        if row.fields is not None:
            batch.append(row.fields)
            size += len(row.raw)
        if len(batch) == BATCH_ROWS or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
