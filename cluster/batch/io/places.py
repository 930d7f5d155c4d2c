"""Where an output is written: drafts on this machine, and the place beside them or behind a URL that takes them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from cluster.batch.io.paths import BESIDE_OUTPUT, file_system, is_url, local_path
from cluster.batch.io.reading import extra_library

ERRORS, MANIFEST = BESIDE_OUTPUT
NAMES = ("", ERRORS, MANIFEST)
TRIAL = ".trial"  # an empty file, for a moment
CLAIM = ".claim"  # while it is there, what lies beside it is ours, whole or not
WRITE_BYTES = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3


class Place(Protocol):
    """An output and the files beside it, each named by what is added to the output's name: `NAMES` and `CLAIM`."""

    def put(self, draft: Path, name: str) -> None:
        """Put a finished draft in place, which takes it away. Raises `OSError`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return what a file holds, None where there is none."""
        ...

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none."""
        ...


class LocalPlace:
    """Files of this machine. `put` is atomic, and outlives a loss of power once it returned."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder = target.parent

    def put(self, draft: Path, name: str) -> None:
        """Rename."""
        draft.replace(self._path(name))
        self._sync()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        path = self._path(name)
        if path.exists():
            path.unlink(missing_ok=True)
            self._sync()

    def read(self, name: str) -> bytes | None:
        """Return what a file holds, None where there is none."""
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none."""
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._target.name}{name}"

    def _sync(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class UrlPlace:
    """Files behind a URL, by fsspec.

    An object store (s3, gs, abfs) shows an uploaded file whole or not at all. Other file systems (sftp, hdfs) show
    one that is being uploaded: there, what is whole is what the manifest names, which comes last.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path

    def put(self, draft: Path, name: str) -> None:
        """Upload."""
        self._files.put_file(str(draft), self._path + name)
        draft.unlink()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self.size(name) is None:
            return
        try:
            self._files.rm_file(self._path + name)
        except FileNotFoundError:
            return  # another driver was faster

    def read(self, name: str) -> bytes | None:
        """Return what a file holds, None where there is none."""
        try:
            data: bytes = self._files.cat_file(self._path + name)
        except FileNotFoundError:
            return None
        return data

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._path + name)["size"])
        except FileNotFoundError:
            return None


def place_of(target: str) -> Place:
    """Return the place of an output. Raises `InputError` naming a URL that cannot be opened."""
    return UrlPlace(*file_system(target)) if is_url(target) else LocalPlace(Path(local_path(target)))


class DraftPaths:
    """Paths for drafts of an output: beside it, for a rename works within a file system only.

    folder: for those of an output behind a URL.
    """

    def __init__(self, target: str, folder: Path) -> None:
        self._folder = folder if is_url(target) else Path(local_path(target)).parent
        self.target_name = target.rsplit("/", 1)[-1]

    def new(self, name: str) -> Path:
        """Return a path for a draft of the output, or of a file beside it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # No two drivers share a draft: one that was taken over finds its own gone, and never a half of another's.
        return self._folder / f".{self.target_name}{name}.{os.getpid()}-{time.monotonic_ns()}.draft"

    def clear(self) -> None:
        """Remove what runs that were killed left behind."""
        names = "|".join(re.escape(f".{self.target_name}{one}.") for one in (*NAMES, TRIAL, CLAIM))
        left = re.compile(rf"({names})\d+-\d+\.draft")
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if left.fullmatch(path.name):
                path.unlink(missing_ok=True)


class ByteSink(Protocol):
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
def open_draft(path: Path, compression: str = "") -> Iterator[ByteSink]:
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


def _compressed(stack: ExitStack, raw: BinaryIO, compression: str) -> ByteSink:
    if compression == ".gz":
        # No name and no time in it: they would make two runs differ.
        packed = stack.enter_context(gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0))
        return stack.enter_context(io.BufferedWriter(packed, WRITE_BYTES))
    if compression == ".zst":
        compressor = extra_library("zstandard", "an output ending in .zst").ZstdCompressor(level=ZSTD_LEVEL)
        sink: ByteSink = stack.enter_context(compressor.stream_writer(raw, closefd=False))
        return sink
    return raw
