"""Which files an input names: a path, a directory, a pattern, or a URL of any of these."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import glob_translate

from cluster.batch.errors import InputError

COMPRESSIONS = (".gz", ".zst")
# What an output's name is followed by in the names of its files of errors and of its manifest.
BESIDE_OUTPUT = (".errors.jsonl", ".manifest.json")
SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of an input.

    path: a local path, or a URL. name: the same, as people know it. suffix: what it holds, such as `.csv`, in lower
    case. compression: one of `COMPRESSIONS`, or "".
    """

    path: str
    name: str
    suffix: str
    compression: str = ""

    @property
    def is_url(self) -> bool:
        """Whether fsspec is to open it."""
        return is_url(self.path)


def is_url(path: str) -> bool:
    """Whether `path` has a scheme other than that of local files."""
    match = SCHEME.match(path)
    return match is not None and match[1].lower() not in {"file", "local"}


def local_path(path: str) -> str:
    """Return a path without the scheme that local files may have."""
    return SCHEME.sub("", path, count=1)


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of `url`, and the path in it. Raises `InputError` naming what it lacks."""
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url} cannot be opened: {error}") from error


def find_files(given: str, endings: Sequence[str]) -> list[InputFile]:
    """Return the files that `given` names, sorted; hidden ones in directories are left out.

    endings: of the names of files that can be read. Raises `InputError` when there is none, or one of another name.
    """
    try:
        paths = _at_url(given) if is_url(given) else _local(local_path(given))
    except OSError as error:
        raise InputError(f"{given} cannot be read: {error.strerror or error}") from error
    return [named_file(path, path, endings) for path in paths]


def named_file(path: str, name: str, endings: Sequence[str]) -> InputFile:
    """Tell by its name what a file holds. Raises `InputError` listing `endings` when it has none of them."""
    pure = PurePosixPath(name.split("?", 1)[0] if is_url(path) else name)
    compression = pure.suffix.lower() if pure.suffix.lower() in COMPRESSIONS else ""
    suffix = (pure.with_suffix("") if compression else pure).suffix.lower()
    if f"{suffix}{compression}" not in endings:
        known = ", ".join(endings)
        raise InputError(f"{name} cannot be read: its name must end in {known}; convert it to one of these")
    return InputFile(path, name, suffix, compression)


def refuse_output(inputs: Sequence[str], output: str) -> None:
    """Raise `InputError` when a file of an output would lie among the inputs: it would be read in the next run."""
    for given, name in product(inputs, ("", *BESIDE_OUTPUT)):
        if _would_name(given, f"{output}{name}"):
            raise InputError(f"{output}{name} would be part of the input {given}; put the output somewhere else")


def identity(path: str) -> Hashable:
    """Return what is equal for all names of a file. path: local, or a URL."""
    return file_system(path) if is_url(path) else os.path.realpath(local_path(path))


def _would_name(given: str, path: str) -> bool:
    if is_url(given) or is_url(path):
        return _covers(given, path)
    one, other = local_path(given), local_path(path)
    # As it is named, and where it lies in truth: a pattern may find it by either.
    return any(_covers(place(one), place(other)) for place in (os.path.abspath, os.path.realpath))


def _covers(given: str, path: str) -> bool:
    if PATTERN.search(given) and not os.path.exists(given):
        return re.match(_translated(given), path) is not None
    return path == given or path.startswith(given.rstrip("/") + "/")


def _translated(pattern: str) -> str:
    """Return a pattern of files as a regular expression; beside others in a name, ** means what * does."""
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/")]
    return str(glob_translate("/".join(parts)))


def _local(given: str) -> list[str]:
    if os.path.isdir(given):
        return _filled(given, sorted(_below(Path(given))), "directory")
    if os.path.exists(given):
        return [given]
    if PATTERN.search(given):
        return _filled(
            given, sorted(one for one in glob.glob(given, recursive=True) if os.path.isfile(one)), "pattern"
        )
    raise InputError(f"{given} is not there; name a file, a directory, a pattern such as 'data/*.jsonl', or -")


def _below(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and not _is_hidden(path.relative_to(folder).parts):
            yield str(path)


def _at_url(given: str) -> list[str]:
    files, path = file_system(given)
    if PATTERN.search(given):
        shown = (one for one in files.glob(path) if not PurePosixPath(one).name.startswith("."))  # as in a shell
        found = _filled(given, sorted(one for one in shown if files.isfile(one)), "pattern")
    elif files.isfile(path):
        return [given]
    elif files.isdir(path):
        below = (one for one in files.find(path) if not _is_hidden(one.removeprefix(path).strip("/").split("/")))
        found = _filled(given, sorted(below), "directory")
    else:
        raise InputError(f"{given} is not there; name a file, a directory or a pattern such as s3://bucket/*.jsonl")
    return [files.unstrip_protocol(one) for one in found]


def _filled(given: str, found: list[str], kind: str) -> list[str]:
    if not found:
        raise InputError(f"{given}: this {kind} holds no file; name one that does")
    return found


def _is_hidden(parts: Sequence[str]) -> bool:
    """Whether a file is hidden, or a mark of the job that wrote its directory, such as _SUCCESS."""
    return any(part.startswith((".", "_")) for part in parts)
