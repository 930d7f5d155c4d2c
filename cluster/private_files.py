"""Files and folders that no other user of the machine reads, whatever the umask says.

What lies in a folder of this kind is closed with it, also what an earlier version left there open to all.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

FOLDER, FILE = 0o700, 0o600
OTHERS = 0o077  # rights of the group and of everybody
logger = logging.getLogger(__name__)


def opener(path: str, flags: int) -> int:
    """Open a file; one that is made is its owner's alone. For the `opener` of `open`."""
    return os.open(path, flags, FILE)


def make_folder(folder: Path) -> None:
    """Make a folder that is its owner's alone; folders around it that are missing are made as the umask says.

    One that is there stays as it is: see `close_to_others`. Raises `OSError`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER, exist_ok=True)


def make_folders(within: Path, folder: Path) -> None:
    """Make a folder below `within`, and those between, all of them their owner's alone. Raises `OSError`."""
    between = folder.relative_to(within).parts
    for depth in range(len(between)):
        within.joinpath(*between[: depth + 1]).mkdir(FOLDER, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Take the rights of all others on a file or folder away, if it is there.

    Where that cannot be done, as it is another user's, a line in the log warns of it.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & OTHERS:
            path.chmod(mode & FOLDER)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is open to other users and cannot be closed to them: %s", path, error.strerror or error)
