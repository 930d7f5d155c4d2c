"""Memory shared by the processes of one host, freed however they end, and words that say when its bytes are ready.

A segment is a file in /dev/shm (or the temporary folder), locked by its owner: the kernel drops the lock when the
owner ends, however it ends, so anyone can tell a dead owner from a live one. Python's own `SharedMemory` is not used
because its resource tracker unlinks segments that other processes use, or complains of them, before Python 3.13.

A process that waits for a word to change takes a short look, then parks in the kernel by futex (sleeps where there is
none). Processors such as Arm's may show another process the word before the bytes that it tells of, or read the
bytes first: so a word orders all that its owner read and wrote before it was published, and all that its reader does
after having read it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import secrets
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import Self

from parallel.errors import ChannelError, ChannelTimeout

_CALL_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
TICK = 0.25  # seconds between checks on the other side while parked
NAP = 0.0002  # seconds between looks where there is no futex


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Fence:
    """A full memory barrier: what this thread did to memory before `pass_through` has happened, for all that follows.

    Taking and releasing a lock is Python's one way to a barrier, and twice makes it a full one.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    def pass_through(self) -> None:
        """Let nothing be reordered across this call."""
        with self._lock:
            pass
        with self._lock:
            pass


class SharedWord:
    """A 32-bit word in memory that several processes have mapped. Offsets must be multiples of 4.

    Who reads a value sees all that its writer wrote to memory before publishing it; and what is written to memory
    after a value was read is not seen by anybody who had not published it yet.
    """

    def __init__(self, memory: mmap, offset: int) -> None:
        # The ctypes object keeps the mapping alive, so that its address stays valid.
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._fence = Fence()
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = _futex_call()
        self._number = _CALL_NUMBERS.get(platform.machine(), 0)

    @property
    def value(self) -> int:
        """The word as it is now."""
        value: int = self._word.value
        self._fence.pass_through()
        return value

    def is_still(self, seen: int) -> bool:
        """Whether the word is `seen`. Orders as reading `value` does only if it is not, so that looking is cheap."""
        if self._word.value == seen:
            return True
        self._fence.pass_through()
        return False

    def publish(self, value: int) -> None:
        """Store `value` and wake everybody who waits for the word to change."""
        self._fence.pass_through()
        self._word.value = value
        if self._call is not None:
            self._call(self._number, self._address, _WAKE, _EVERYONE, None, None, 0)

    def park(self, seen: int, seconds: float) -> None:
        """Sleep until the word is no longer `seen`, at most `seconds`; may return early."""
        if self._call is None:
            time.sleep(min(seconds, NAP))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._call(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)


def wait_for_change(
    word: SharedWord, seen: int, spin: float, deadline: float | None, check: Callable[[], None]
) -> None:
    """Return once `word` is not `seen`.

    spin: seconds of looking, yielding the core between looks, before parking.
    deadline: of `time.monotonic`, None for never. check: called now and then, raises when waiting has become vain.

    Raises `ChannelTimeout` at the deadline.
    """
    spin_end = time.perf_counter() + spin
    while word.is_still(seen):
        if time.perf_counter() < spin_end:
            os.sched_yield()
            continue
        left = TICK if deadline is None else min(TICK, deadline - time.monotonic())
        if left <= 0:
            raise ChannelTimeout("nothing came by the deadline")
        word.park(seen, left)
        if word.is_still(seen):
            check()


def _futex_call() -> Callable[..., int] | None:
    if sys.platform != "linux" or platform.machine() not in _CALL_NUMBERS:
        return None
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return syscall


PREFIX = "squadron-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
_OPENED = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, no pipe waited for
NEWBORN = 60.0  # seconds within which a segment may not be locked yet by the process that is making it


class Segment:
    """Shared memory with a name. The owner's end unlinks the name on `close`, on collection and at exit.

    name: of the file in the folder of `shared_folder`, which cannot be guessed; the file is this user's alone.
    `memory` stays usable after `close` for those who still hold views of it.
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

        Raises `ChannelError` when it is gone, and for what is no segment of this user alone.
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

    All users may write to the folder: what is not ours, or changes meanwhile, is left, and does no harm.
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
