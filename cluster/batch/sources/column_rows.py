"""Rows of files that hold values rather than text: Parquet and Avro here, ORC and TFRecord by Ray Data."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import msgspec

from cluster.batch.errors import InputError
from cluster.batch.extra import extra_library
from cluster.batch.rows import SourceRow
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.ray_records import read_by_ray
from cluster.batch.sources.reading import open_bytes

BATCH_ROWS = 256
BATCH_BYTES = 64 << 20  # of values, in as many rows as are decoded at once


def read_parquet_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the rows of a Parquet file; a row group at a time is in memory, as it lies in the file.

    A value that the file holds once for many rows is there once in memory too, besides in the row that is read.
    """
    return _rows(file, _parquet(file), first, limit)


def read_avro_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the records of an Avro file."""
    return _rows(file, _avro(file), first, limit)


def read_ray_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the rows of a file of `RAY_READERS`."""
    return _rows(file, read_by_ray(file), first, limit)


def _rows(file: InputFile, records: Iterable[Mapping[str, Any]], first: int, limit: int) -> Iterator[SourceRow]:
    """Number records from `first`. limit: bytes that one may have as JSON. Bytes that are UTF-8 become text."""
    for number, record in enumerate(records, start=first):
        fields = {name: _text(value) for name, value in record.items()}
        yield _row(f"{file.name} row {number - first + 1}", fields, number, limit)


def _row(place: str, fields: Mapping[str, Any], number: int, limit: int) -> SourceRow:
    try:
        raw = msgspec.json.encode(fields, enc_hook=_plain)
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
            raise _damaged(file, error) from error


def _texts(schema: Any) -> list[str]:
    """Paths of the columns whose values can be of any length."""
    columns = [schema.column(index) for index in range(len(schema))]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _rows_at_once(known: Any) -> int:
    """Return how many rows of the row group with the longest ones are decoded together."""
    groups = [known.row_group(index) for index in range(known.num_row_groups)]
    longest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, longest))))


def _avro(file: InputFile) -> Iterator[dict[str, Any]]:
    library = extra_library("fastavro", file.name)
    with open_bytes(file) as data:
        try:
            for record in library.reader(data):
                # A union or array at the top has no columns.
                yield record if isinstance(record, dict) else {"value": record}
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise _damaged(file, error) from error


def _damaged(file: InputFile, error: Exception) -> InputError:
    return InputError(f"{file.name} is damaged, or not what its name says: {error}")


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _plain(value: Any) -> Any:
    """Return a value that JSON has no word for, such as a numpy array, as one that it has."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
