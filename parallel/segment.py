"""A piece of memory that the processes of one host share, and that nobody's death leaks.

It is a file in /dev/shm (or the temporary folder), locked by its owner: the kernel drops the lock when the owner
ends, however it ends, so anyone can tell a dead owner from a live one. Python's own `SharedMemory` is not used
because its resource tracker unlinks segments that other processes use, or complains of them, before Python 3.13.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
import weakref
from mmap import mmap
from pathlib import Path
from typing import Self

from parallel.errors import ChannelError

PREFIX = "squadron-"
NEWBORN = 60.0  # seconds within which a segment may not be locked yet by the process that is making it


class Segment:
    """Shared memory with a name. The owner's end unlinks the name on `close`, on collection and at exit.

    name: path of the file; `memory` stays usable after `close` for whoever still holds views of it.
    """

    def __init__(self, descriptor: int, name: str, owner: bool) -> None:
        self.name = name
        self.memory = mmap(descriptor, 0)
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _end, descriptor, name if owner else None)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make a segment of `size` zero bytes with a name of its own. Raises `ChannelError` when there is no room."""
        _sweep()
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=_folder())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if sys.platform == "linux":
                # Reserved now: writing to a page that a full /dev/shm cannot give would kill the process with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError as error:
            _end(descriptor, name)
            raise ChannelError(f"no room for {size} bytes of shared memory in {_folder()}: {error}") from error
        return cls(descriptor, name, owner=True)

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Map the segment that another process made. Raises `ChannelError` when it is gone."""
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ChannelError(f"the driver's shared memory {name} is gone: {error}") from error
        return cls(descriptor, name, owner=False)

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
        Path(self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go; the owner's end removes the name. Can be called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _end(descriptor: int, name: str | None) -> None:
    if name is not None:
        Path(name).unlink(missing_ok=True)
    os.close(descriptor)


def _folder() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()  # noqa: S108 - the point is to share it


def _sweep() -> None:
    """Remove segments of processes that were killed before their readers had attached."""
    for path in Path(_folder()).glob(f"{PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < NEWBORN:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner removed it just now
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(descriptor)
