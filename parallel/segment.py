"""A piece of memory that the processes of one host share, and that nobody's death leaks.

It is a file in /dev/shm (or the temporary folder), locked by its owner: the kernel drops the lock when the owner
ends, however it ends, so anyone can tell a dead owner from a live one. Python's own `SharedMemory` is not used
because its resource tracker unlinks segments that other processes use, or complains of them, before Python 3.13.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Self

from parallel.errors import ChannelError

PREFIX = "squadron-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
_OPENED = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, no pipe waited for
NEWBORN = 60.0  # seconds within which a segment may not be locked yet by the process that is making it


class Segment:
    """Shared memory with a name. The owner's end unlinks the name on `close`, on collection and at exit.

    name: of the file in the folder of `shared_folder`, which nobody can guess; the file is this user's alone.
    `memory` stays usable after `close` for whoever still holds views of it.
    """

    def __init__(self, descriptor: int, path: Path, owner: bool) -> None:
        self.name = path.name
        self.path = path
        self.memory = mmap(descriptor, 0)
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _end, descriptor, path if owner else None)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make a segment of `size` zero bytes with a name of its own. Raises `ChannelError` when there is no room."""
        _sweep()
        path = Path(shared_folder()) / f"{PREFIX}{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, _OPENED | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ChannelError(f"no shared memory can be made in {path.parent}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if sys.platform == "linux":
                # Reserved now: writing to a page that a full /dev/shm cannot give would kill the process with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError as error:
            _end(descriptor, path)
            raise ChannelError(f"no room for {size} bytes of shared memory in {path.parent}: {error}") from error
        return cls(descriptor, path, owner=True)

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Map the segment that another process of this user made.

        Raises `ChannelError` when it is gone, and for what is no segment of this user alone, whoever names it.
        """
        if not _NAME.fullmatch(name):
            raise ChannelError(f"{name!r} is no name of shared memory")
        path = Path(shared_folder()) / name
        try:
            descriptor = os.open(path, _OPENED)
        except OSError as error:
            raise ChannelError(f"the driver's shared memory {name} is gone: {error}") from error
        facts = os.fstat(descriptor)
        if not _is_ours(facts) or stat.S_IMODE(facts.st_mode) & 0o077 or not facts.st_size:
            os.close(descriptor)
            raise ChannelError(f"{name} is not shared memory of this user alone")
        return cls(descriptor, path, owner=False)

    def owner_alive(self) -> bool:
        """Whether the process that made the segment lives and has not closed it; for the other processes."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def unlink(self) -> None:
        """Remove the name, once everybody who needs it has attached: then no crash can leave it behind."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go; the owner's end removes the name. Can be called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def shared_folder() -> str:
    """Return the folder that the processes of this host share memory in."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()  # noqa: S108 - the point is to share it


def _end(descriptor: int, path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _is_ours(facts: os.stat_result) -> bool:
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()


def _sweep() -> None:
    """Remove segments of processes that were killed before their readers had attached.

    Everybody may write to the folder: what is not ours, or changes meanwhile, is left, and harms nobody.
    """
    for path in Path(shared_folder()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = path.lstat()
            if not _is_ours(facts) or time.time() - facts.st_mtime < NEWBORN:
                continue
            descriptor = os.open(path, _OPENED)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or it is in use
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
