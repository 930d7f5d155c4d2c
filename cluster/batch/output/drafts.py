"""A file that is being written: compressed by its name, with the same bytes for the same content."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from cluster.batch.extra import extra_library

WRITE_BYTES = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3


class Sink(Protocol):
    """Takes bytes."""

    def write(self, data: bytes, /) -> int:
        """Take them all; return how many."""
        ...


class OutputFile(msgspec.Struct, frozen=True):
    """A file that was written. name: without its folder. size: bytes. sha256: in hex."""

    name: str
    size: int
    sha256: str


@contextmanager
def open_draft(path: Path, compression: str = "") -> Iterator[Sink]:
    """Open a new file; on the disk when this ends. compression: `.gz`, `.zst` or ""."""
    with path.open("xb", WRITE_BYTES) as raw:
        with ExitStack() as stack:
            yield _compressed(stack, raw, compression)
        raw.flush()
        os.fsync(raw.fileno())


def described(path: Path, name: str) -> OutputFile:
    """Return what a manifest says of the file at `path`, that will be called `name`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return OutputFile(name, file.seek(0, os.SEEK_END), digest)


def _compressed(stack: ExitStack, raw: BinaryIO, compression: str) -> Sink:
    if compression == ".gz":
        # No name and no time in it: they would tell two runs apart.
        packed = stack.enter_context(gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0))
        return stack.enter_context(io.BufferedWriter(packed, WRITE_BYTES))
    if compression == ".zst":
        compressor = extra_library("zstandard", "an output ending in .zst").ZstdCompressor(level=ZSTD_LEVEL)
        sink: Sink = stack.enter_context(compressor.stream_writer(raw, closefd=False))
        return sink
    return raw
