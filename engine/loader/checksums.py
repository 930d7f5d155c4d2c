"""Weights against the sums published with them: a flipped bit changes tokens, and nothing else would show it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from engine.errors import CheckpointError
from engine.loader.checkpoint import HUB_FILES, WEIGHT_FILES, weight_files

SUMS_FILE = "SHA256SUMS"  # as `sha256sum *.safetensors > SHA256SUMS` writes it
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def summed_files(folder: Path) -> Mapping[str, str]:
    """Return file name -> SHA-256 in hex, of the files that a checkpoint is read from and has in its `SHA256SUMS`.

    Sums are often those of a whole repository: lines for files that were not fetched, or that nothing reads (weights
    in other formats, pictures, folders), say nothing of what is served. A weight file that is missing is refused
    where the weights are looked for. Raises `CheckpointError` naming the line that is none.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    weights = weight_files(folder)
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise CheckpointError(f"{path}:{number}: must be a SHA-256 in hex, two spaces and the name of a file")
        name = match[2].removeprefix("./")
        if name in weights or (_is_read(name) and (folder / name).is_file()):
            found[name] = match[1].lower()
    return found


def check_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Compare files of a checkpoint with their sums; reads them whole, at disk speed.

    Raises `CheckpointError` naming the file that differs or cannot be read.
    """
    for name, expected in sums.items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: weight file {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
        if found != expected:
            raise CheckpointError(
                f"{folder / name}: damaged: its SHA-256 is not the one in {SUMS_FILE}; fetch it again"
            )


def _is_read(name: str) -> bool:
    """Whether a file beside the weights has a part in what is served."""
    return Path(name).name == name and any(
        fnmatchcase(name, pattern) for pattern in HUB_FILES if pattern != WEIGHT_FILES
    )
