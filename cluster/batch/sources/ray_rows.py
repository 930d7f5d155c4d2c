"""Rows of what Ray Data reads: Parquet, ORC, Avro, TFRecord. In the order of the file, a few blocks in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cluster.batch.errors import InputError
from cluster.batch.extra import extra_library
from cluster.batch.rows import SourceRow
from cluster.batch.sources.found import InputFile

READ_BY: Mapping[str, str] = {
    ".parquet": "read_parquet",
    ".orc": "read_orc",
    ".avro": "read_avro",
    ".tfrecord": "read_tfrecords",
    ".tfrecords": "read_tfrecords",
}
BATCH_ROWS = 256
CONCURRENT_READS = 2


def read_ray_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield the rows of a file, numbered from `first`; bytes that are UTF-8 are text, as TFRecord has no other.

    limit: bytes that a row may have as JSON. Raises `InputError` when the file or a library cannot be read.
    """
    for number, fields in enumerate(_records(file), start=first):
        place = f"{file.name} row {number - first + 1}"
        try:
            raw = msgspec.json.encode(fields, enc_hook=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            yield SourceRow(number, place, None, repr(fields).encode(), f"it holds what is no JSON: {error}")
            continue
        if len(raw) > limit:
            yield SourceRow(number, place, None, raw, f"the row is longer than {limit} bytes")
        else:
            yield SourceRow(number, place, fields, raw)


def _records(file: InputFile) -> Iterator[dict[str, Any]]:
    data = extra_library("ray.data", file.name)
    errors = (extra_library("ray.exceptions", file.name).RayError, ImportError, OSError, ValueError)
    batches = iter(())
    try:
        batches = iter(_dataset(data, file).iter_batches(batch_size=BATCH_ROWS, batch_format="pyarrow"))
    except errors as error:
        raise _unreadable(file, error) from error
    while True:
        try:
            batch = next(batches, None)
        except errors as error:
            raise _unreadable(file, error) from error
        if batch is None:
            return
        for fields in batch.to_pylist():
            yield {name: _text(value) for name, value in fields.items()}


def _dataset(data: Any, file: InputFile) -> Any:
    read = getattr(data, READ_BY[file.suffix])
    # Tasks elsewhere do not see this machine's files. No CPU is asked for: the model's replicas may hold them all.
    path = file.path if file.is_url else f"local://{os.path.abspath(file.path)}"
    dataset = read(path, file_extensions=None, concurrency=CONCURRENT_READS, ray_remote_args={"num_cpus": 0})
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    return dataset


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _plain(value: Any) -> Any:
    """Return a value that JSON has no word for, such as a numpy array, as one that it has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _unreadable(file: InputFile, error: BaseException) -> InputError:
    if isinstance(error, ImportError):
        return InputError(f"{file.name} needs a library that is not here: {error}; pip install 'squadron[data]'")
    lines = [line for line in str(error).splitlines() if line.strip()]
    return InputError(f"{file.name} cannot be read: {lines[-1].strip() if lines else type(error).__name__}")
