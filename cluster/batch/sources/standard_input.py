"""Standard input, kept in a file so that it can be read again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cluster.batch.errors import InputError
from cluster.private_files import make_folder, opener

COPY_BYTES = 1 << 20
NAME = "stdin"


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
