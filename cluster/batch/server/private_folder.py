"""A folder among those of other users, that none of them reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cluster.batch.errors import LedgerError

ONLY_OURS = 0o700


def make_private(folder: Path) -> None:
    """Make a folder that only this user opens, or make it so. Raises `LedgerError` where it is another user's."""
    try:
        folder.mkdir(mode=ONLY_OURS, exist_ok=True)
        found = folder.lstat()  # a link may lead anywhere
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if stat.S_IMODE(found.st_mode) & ~ONLY_OURS:
                folder.chmod(ONLY_OURS)
            return
    except OSError as error:
        raise LedgerError(f"{folder} cannot be made: {error.strerror}; name another place with TMPDIR") from error
    raise LedgerError(
        f"{folder} is no folder of this user's, so others could read it; name another place with TMPDIR"
    )
