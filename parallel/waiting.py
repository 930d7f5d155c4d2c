"""A 32-bit word of shared memory that tells of the bytes beside it, and waiting for it to change.

Whoever waits takes a short look, then parks in the kernel by futex (sleeps where there is none). Processors such as
Arm's may show another process the word before the bytes that it tells of, or read the bytes first: so a word orders
all that its owner read and wrote before it was published, and all that its reader does after having read it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from mmap import mmap
from threading import Lock

from parallel.errors import ChannelTimeout

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
