"""Weights against the sums published with them: a flipped bit changes tokens, and nothing else would show it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.errors import CheckpointError

SUMS_FILE = "SHA256SUMS"  # as `sha256sum *.safetensors > SHA256SUMS` writes it


def check_sums(folder: Path) -> None:
    """Compare the files of a checkpoint with its `SHA256SUMS`, where it has one; reads them whole, at disk speed.

    Raises `CheckpointError` naming the file that differs or is missing.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            _check(folder, line, f"{path}:{number}")


def _check(folder: Path, line: str, where: str) -> None:
    expected, _, name = line.partition(" ")
    name = name.lstrip(" *")
    if len(expected) != 64 or not name or Path(name).name != name:
        raise CheckpointError(f"{where}: must be a SHA-256 in hex, two spaces and the name of a file beside it")
    try:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {name} is missing ({SUMS_FILE} names it)") from None
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
    if found != expected.lower():
        raise CheckpointError(f"{folder / name}: damaged: its SHA-256 is not the one in {SUMS_FILE}; fetch it again")
