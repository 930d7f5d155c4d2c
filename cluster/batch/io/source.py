"""An input as a whole: its files one after the other, standard input among them, each with its reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cluster.batch.errors import InputError
from cluster.batch.io.paths import COMPRESSIONS, InputFile, find_files, identity, named_file
from cluster.batch.io.readers import (
    read_csv_rows,
    read_json_rows,
    read_parquet_rows,
    read_text_rows,
)
from cluster.batch.io.reading import MAX_LINE_BYTES, version_of
from cluster.batch.rows import SourceRow
from cluster.private_files import make_folder, opener

COPY_BYTES = 1 << 20
NAME = "stdin"
Reader = Callable[[InputFile, int, int], Iterator[SourceRow]]
LINE_READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_rows,
    ".ndjson": read_json_rows,
    ".json": read_json_rows,
    ".csv": read_csv_rows,
    ".txt": read_text_rows,
}
READERS: Mapping[str, Reader] = {**LINE_READERS, ".parquet": read_parquet_rows}
# What names may end in.
ENDINGS = (*(f"{suffix}{packed}" for suffix in LINE_READERS for packed in ("", *COMPRESSIONS)), ".parquet")
STANDARD_INPUT = "-"
MAX_NAMED = 3  # files that a message names


class FileSource:
    """An `InputSource` of files. Raises `InputError` where one of them changes between two readings (`version_of`).

    files: in the order of their rows. limit: bytes that a row may have in a file of lines.
    """

    def __init__(self, files: Sequence[InputFile], limit: int = MAX_LINE_BYTES) -> None:
        self.files = tuple(files)
        self._limit = limit
        self._seen = {file: version_of(file) for file in self.files}

    @property
    def named(self) -> str:
        """The files by name, as a message can hold them."""
        names = [file.name for file in self.files[:MAX_NAMED]]
        more = len(self.files) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def rows(self) -> Iterator[SourceRow]:
        """Yield all rows, numbered through all files."""
        number = 0
        for file in self.files:
            self._check(file)
            for row in READERS[file.suffix](file, number, self._limit):
                number = row.number + 1
                yield row
            self._check(file)

    def _check(self, file: InputFile) -> None:
        if version_of(file) != self._seen[file]:
            raise InputError(
                f"{file.name} has changed while it was read; put it back, or begin anew with a new output"
            )


def open_source(
    inputs: Sequence[str],
    spool: Path,
    stdin: BinaryIO | None = None,
    stdin_suffix: str = ".jsonl",
    begun: bool = False,
    limit: int = MAX_LINE_BYTES,
) -> FileSource:
    """Return what `inputs` name, as one source: paths, directories, patterns, URLs, and "-" for standard input.

    spool: the folder in which standard input is kept; with that of an earlier run, what it kept is used again, and
    never replaced where rows of it were begun (see `spooled`). stdin_suffix: what standard input holds, such as
    `.csv.gz`. limit: bytes that a line may have. Raises `InputError` naming what is not there or cannot be told.
    """
    if not inputs:
        raise InputError("no input is named; name a file, a directory, a pattern such as 'data/*.jsonl', or -")
    if list(inputs).count(STANDARD_INPUT) > 1:
        raise InputError("standard input (-) is named twice; name it once")
    files: list[InputFile] = []
    for given in inputs:
        if given == STANDARD_INPUT:
            files.append(_standard_input(stdin or sys.stdin.buffer, spool, stdin_suffix, begun))
        else:
            files += find_files(given, ENDINGS)
    _refuse_repeated(files)
    return FileSource(files, limit)


def _standard_input(stream: BinaryIO, spool: Path, suffix: str, begun: bool) -> InputFile:
    named_file("", f"stdin{suffix}", ENDINGS)  # before anything is read
    path = spooled(stream, spool, suffix, begun)
    return named_file(str(path), f"stdin{suffix}", ENDINGS)


def _refuse_repeated(files: Sequence[InputFile]) -> None:
    seen: dict[Hashable, InputFile] = {}
    for file in files:
        first = seen.setdefault(identity(file.path), file)
        if first is not file:
            also = "" if first.name == file.name else f", the first time as {first.name}"
            raise InputError(f"{file.name} is named twice{also}; name each file once")


def spooled(stream: BinaryIO, folder: Path, suffix: str, begun: bool) -> Path:
    """Return a file in `folder` that holds what `stream` gives, to the end.

    A file that an earlier run left is whole, and is used again when nothing is given (a terminal, `</dev/null`), or
    the same once more. begun: whether rows of that file were worked on: it is never replaced then. Raises
    `InputError` when something else is given than was begun, or nothing was ever.
    """
    path = kept_path(folder, suffix)
    try:
        if begun and path.exists():
            if not stream.isatty():
                _compare(stream, path)
        elif stream.isatty():
            if not path.exists():
                raise InputError("standard input is a terminal: pipe rows into it, or name a file instead of -")
        else:
            make_folder(folder)
            _keep(stream, path)
    except OSError as error:
        raise InputError(f"standard input cannot be kept in {folder}: {error.strerror}") from error
    return path


def kept_path(folder: Path, suffix: str) -> Path:
    """Return where `spooled` keeps what it is given."""
    return folder / f"{NAME}{suffix}"


def forget(path: Path) -> None:
    """Remove what `spooled` kept, if it is there, and its folder unless something else lies in it.

    Raises `InputError`.
    """
    if not path.exists():
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be removed: {error.strerror}") from error
    with suppress(OSError):
        path.parent.rmdir()


def _keep(stream: BinaryIO, path: Path) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        with open(draft, "wb", opener=opener) as file:
            while chunk := stream.read(COPY_BYTES):
                file.write(chunk)
            given = file.tell()
            file.flush()
            os.fsync(file.fileno())
        if given:
            draft.rename(path)
        elif not path.exists():
            raise InputError("standard input is empty: pipe rows into it, or name a file instead of -")
    finally:
        draft.unlink(missing_ok=True)


def _compare(stream: BinaryIO, path: Path) -> None:
    with path.open("rb") as kept:
        if not (chunk := stream.read(COPY_BYTES)):
            return
        while chunk:
            if kept.read(len(chunk)) != chunk:
                break
            chunk = stream.read(COPY_BYTES)
        if chunk or kept.read(1):
            raise InputError(
                f"standard input is not what the first run of this batch was given, which is kept in {path}; give "
                "the same, or nothing (</dev/null) to go on with what is kept, or delete that file to begin anew"
            )
