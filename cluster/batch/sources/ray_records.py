"""Records of what Ray Data reads, in the order of the file, a few blocks in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from cluster.batch.errors import InputError
from cluster.batch.extra import extra_library
from cluster.batch.sources.found import InputFile

RAY_READERS: Mapping[str, str] = {
    ".orc": "read_orc",
    ".tfrecord": "read_tfrecords",
    ".tfrecords": "read_tfrecords",
}
NODE_LABEL = "ray.io/node-id"
BATCH_ROWS = 256


def read_by_ray(file: InputFile) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. Raises `InputError` when it, a library or a Ray that it needs is not there."""
    if not ray.is_initialized():
        raise InputError(
            f"{file.name} is read by Ray Data, and no Ray is connected: connect to one first, or write it as Parquet"
        )
    data = extra_library("ray.data", file.name)
    errors = (ray.exceptions.RayError, ImportError, OSError, ValueError)
    try:
        batches = iter(_dataset(data, file).iter_batches(batch_size=BATCH_ROWS, batch_format="pyarrow"))
    except errors as error:
        raise _unreadable(file, error) from error
    while (batch := _next(file, batches, errors)) is not None:
        yield from batch.to_pylist()


def _next(file: InputFile, batches: Iterator[Any], errors: tuple[type[Exception], ...]) -> Any:
    try:
        return next(batches, None)
    except errors as error:
        raise _unreadable(file, error) from error


def _dataset(data: Any, file: InputFile) -> Any:
    read = getattr(data, RAY_READERS[file.suffix])
    # Tasks elsewhere do not see this machine's files. No CPU is asked for: the model's replicas may hold them all.
    here = None if file.is_url else {NODE_LABEL: ray.get_runtime_context().get_node_id()}
    path = file.path if file.is_url else os.path.abspath(file.path)
    dataset = read(path, file_extensions=None, concurrency=1, num_cpus=0, label_selector=here)
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    return dataset


def _unreadable(file: InputFile, error: Exception) -> InputError:
    # Errors of a task hold its stack; the last line says what went wrong.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, ImportError):
        return InputError(f"{file.name} needs a library that is not here ({lines[-1]}); install it")
    return InputError(f"{file.name} cannot be read: {lines[-1]}")
