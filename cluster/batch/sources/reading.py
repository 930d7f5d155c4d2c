"""Bytes of an input file: local or behind a URL, decompressed, in bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cluster.batch.errors import InputError, UnreachableError
from cluster.batch.extra import extra_library
from cluster.batch.sources.found import InputFile, file_system

READ_BYTES = 1 << 20
# Compressed bytes that are taken in at once: what a damaged or hostile file can blow them up to stays below 32 MiB.
ZSTD_BYTES = 1024
# What a frame may ask to be kept of what it has told, as zstd itself takes by default; the format allows terabytes.
ZSTD_WINDOW_BYTES = 128 << 20


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
    """What zstandard's own stream reader is, but that a file that was cut short is told: `EOFError`."""

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
