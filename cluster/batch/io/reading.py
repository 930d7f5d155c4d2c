"""Bytes and lines of an input file: local or behind a URL, decompressed, in bounded memory, and of one version."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import zlib
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedIOBase
from typing import Any

from cluster.batch.errors import InputError, UnreachableError
from cluster.batch.io.paths import InputFile, file_system

READ_BYTES = 1 << 20
# Compressed bytes that are taken in at once: what a damaged or hostile file can blow them up to stays below 32 MiB.
ZSTD_BYTES = 1024
# What a frame may ask to be kept of what it has written, as zstd itself takes by default; the format has terabytes.
ZSTD_WINDOW_BYTES = 128 << 20
# By fsspec's file systems, in lower case. No time of access is among them, which reading changes.
TELLING = frozenset(
    {
        "size",
        *("etag", "md5hash", "content-md5", "crc32c", "digest", "sha", "generation"),
        *("mtime", "modified", "last_modified", "lastmodified", "last_write_time", "modificationtime", "modify"),
        *("updated", "created"),
    }
)
MAX_LINE_BYTES = 64 << 20
SKIP_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


def extra_library(module: str, what: str) -> Any:
    """Import a library of the extra `data`. Raises `InputError` when it is missing; `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        remedy = "pip install -e '.[data]' in Squadron's folder"
        raise InputError(f"{what} needs {missing}, which is not here: {remedy}") from error


@contextmanager
def open_bytes(file: InputFile) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressed. Raises `InputError` naming it when it cannot be read, now or later.

    That is `UnreachableError` where another attempt may succeed.
    """
    with ExitStack() as stack:
        try:
            yield _decompressed(stack, stack.enter_context(_opened(file)), file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{file.name} is damaged or cut short ({error}); make or fetch it again") from error
        except OSError as error:
            raise unreadable(file, error) from error


def unreadable(file: InputFile, error: OSError) -> InputError:
    """Return what to raise for a file that cannot be read."""
    kind = InputError if isinstance(error, FileNotFoundError) else UnreachableError
    return kind(f"{file.name} cannot be read: {error.strerror or error}")


def _opened(file: InputFile) -> io.BufferedIOBase:
    if not file.is_url:
        return io.BufferedReader(io.FileIO(file.path), READ_BYTES)
    files, path = file_system(file.path)
    return io.BufferedReader(files.open(path, "rb"), READ_BYTES)


def _decompressed(stack: ExitStack, raw: io.BufferedIOBase, file: InputFile) -> io.BufferedIOBase:
    if file.compression == ".gz":
        return stack.enter_context(gzip.open(raw))
    if file.compression == ".zst":
        return stack.enter_context(io.BufferedReader(_ZstdStream(raw, file.name), READ_BYTES))
    return raw


class _ZstdStream(io.RawIOBase):
    """What zstandard's own stream reader is, but that a file that was cut short raises `EOFError`."""

    def __init__(self, raw: io.BufferedIOBase, name: str) -> None:
        self._library = extra_library("zstandard", f"{name} (.zst)")
        self._name = name
        self._raw = raw
        self._frame: Any = None
        self._rest = b""  # compressed, after the end of a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is there for that."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill part of `buffer`; 0 at the end."""
        while not self._ready:
            chunk = self._rest or self._raw.read(ZSTD_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("its last zstd frame has no end")
                return 0
            self._ready = memoryview(self._plain(chunk))
        length = min(len(buffer), len(self._ready))
        buffer[:length] = self._ready[:length]
        self._ready = self._ready[length:]
        return length

    def _plain(self, chunk: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
        try:
            plain: bytes = self._frame.decompress(chunk)
        except self._library.ZstdError as error:
            if "Frame requires too much memory" in str(error):
                limit = f"a window of more than {ZSTD_WINDOW_BYTES >> 20} MiB"
                raise InputError(f"{self._name} needs {limit}; compress it without --long") from error
            raise EOFError(str(error)) from error
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return plain


def version_of(file: InputFile) -> Hashable:
    """Return what is another value once a file was written to.

    Of local files size and time of change, behind a URL what there is of `TELLING`. Raises `InputError` when the file
    is gone, `UnreachableError` when it cannot be looked at.
    """
    try:
        return _version_at_url(file.path) if file.is_url else _local_version(file.path)
    except OSError as error:
        raise unreadable(file, error) from error


def _local_version(path: str) -> Hashable:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _version_at_url(url: str) -> Hashable:
    files, path = file_system(url)
    files.invalidate_cache()  # else it may answer from what it has cached
    told = files.info(path)
    return tuple((name, str(told[name])) for name in sorted(told) if name.lower() in TELLING)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file. number: from 1. text: without its end; of one that is `too_long`, BLAKE2b of it instead."""

    number: int
    text: bytes
    too_long: bool = False


def read_lines(file: BufferedIOBase, limit: int) -> Iterator[Line]:
    """Yield the lines of a file that are not blank. limit: bytes that a line may have."""
    number = 0
    while data := file.readline(limit + 2):  # and its end, as Windows writes it
        number += 1
        if number == 1:
            data = data.removeprefix(BOM)
        text = data.rstrip(b"\r\n")
        if len(text) > limit:
            yield Line(number, _skipped(file, data), too_long=True)
        elif not text.isspace() and text:
            yield Line(number, text)


def _skipped(file: BufferedIOBase, begun: bytes) -> bytes:
    """Read on to the end of a line; return its digest."""
    digest = blake2b(begun, digest_size=32)
    part = begun
    while part and not part.endswith(b"\n"):
        part = file.readline(SKIP_BYTES)
        digest.update(part)
    return digest.digest()
