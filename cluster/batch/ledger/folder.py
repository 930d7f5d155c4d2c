"""The folder of a ledger: what in it is the ledger's own, and how that goes.

`job.json` decides. Without it, whatever else is there is left of a ledger whose removal was cut off, and counts for
nothing; so it goes first, and the epochs, which tell who may write, go last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from cluster.batch.errors import LedgerError

JOB_FILE = "job.json"
REPLICAS_FILE = "replicas"  # the fingerprint that they tell
OUTPUT_FILE = "squadron-output.jsonl"  # of a server's batch, until the store has it
EPOCH_FILE = re.compile(r"epoch-(\d{8})")
HOLDERS = ("epoch-", "draft-")  # who writes, and who tries to
STANDARD_INPUT = "stdin."
OWN_FILE = re.compile(
    r"job\.(json|draft)|replicas(\.draft)?|parts-\d{8}\.(json|draft)|order-\d{8}"
    r"|rows-\d{8}\.log|tokens-\d{8}-\d{8}\.(log|draft)"
    r"|epoch-\d{8}|draft-.+-\d+-\d+"
    r"|stdin\..+"
    r"|\..+\.\d+-\d+\.draft"  # of an output behind a URL
    rf"|{re.escape(OUTPUT_FILE)}.*"
)
OWN_FOLDER = re.compile(r"ids-\w{8}")  # of the check of an input


def refuse_foreign(folder: Path) -> None:
    """Raise `LedgerError` when there is anything in `folder` that no ledger has written."""
    try:
        foreign = next((path.name for path in folder.iterdir() if not _is_own(path)), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerError(f"{folder} cannot be read: {error.strerror}; name another with --ledger") from error
    if foreign is not None:
        raise LedgerError(
            f"{folder} holds {foreign!r}, which is of no ledger: give the ledger a folder of its own, such as "
            f"--ledger {folder / 'ledger'}, or move that file away"
        )


def refuse_within(folder: Path, paths: Iterable[str]) -> None:
    """Raise `LedgerError` when one of `paths`, of this machine, lies in `folder`, or is a folder around it.

    What lies in it would go with the ledger; what reads a folder around it would take the ledger for rows.
    """
    ledger = Path(os.path.realpath(folder))
    for path in paths:
        other = Path(os.path.realpath(path))
        if ledger in (other, *other.parents):
            raise LedgerError(
                f"{path} lies in {folder}, the folder of the ledger, which is removed when the batch is done: move "
                "it, or name another folder with --ledger"
            )
        if other in ledger.parents:
            raise LedgerError(f"{folder}, the folder of the ledger, lies in {path}: name another with --ledger")


def begin_anew(folder: Path) -> None:
    """Remove what a ledger has left, but not who holds it, nor the input that it keeps. Raises `OSError`."""
    _remove(folder, lambda name: not name.startswith((*HOLDERS, STANDARD_INPUT)))


def remove_contents(folder: Path) -> None:
    """Remove all that is a ledger's, but not who holds it. Raises `OSError`."""
    _remove(folder, lambda name: not name.startswith(HOLDERS))


def remove_holders(folder: Path, last: int) -> None:
    """Remove the epochs up to `last`, and what claims that were killed have left. Raises `OSError`."""
    _remove(folder, lambda name: name.startswith(HOLDERS) and _epoch(name) <= last)


def remove_empty(folder: Path) -> None:
    """Remove the folder itself; it stays where others have put something into it, or it is a mount."""
    with suppress(OSError):
        folder.rmdir()


def latest_epoch(folder: Path) -> int:
    """Return the number of the last epoch that began, 0 for none. Raises `OSError`."""
    return max((_epoch(path.name) for path in folder.iterdir()), default=0)


def _epoch(name: str) -> int:
    match = EPOCH_FILE.fullmatch(name)
    return int(match[1]) if match else 0


def _is_own(path: Path) -> bool:
    return (OWN_FOLDER if path.is_dir() else OWN_FILE).fullmatch(path.name) is not None


def _remove(folder: Path, chosen: Callable[[str], bool]) -> None:
    """Remove what is a ledger's and `chosen` by its name: of what is there now, for others may begin meanwhile."""
    paths = [path for path in folder.iterdir() if chosen(path.name) and _is_own(path)]
    for path in sorted(paths, key=lambda path: (path.name != JOB_FILE, path.name)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
