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


def read_parquet_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the rows of a Parquet file; a row group at a time is in memory, as it lies in the file."""
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
            with closing(library.ParquetFile(data)) as table:
                for batch in table.iter_batches(batch_size=BATCH_ROWS):
                    yield from batch.to_pylist()
        except ValueError as error:  # ArrowInvalid is one
            raise _damaged(file, error) from error


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
