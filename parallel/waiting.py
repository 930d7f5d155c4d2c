"""Waiting for a 32-bit word of shared memory to change: a short look, then the kernel's futex (sleeps elsewhere)."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from mmap import mmap

from parallel.errors import ChannelTimeout

_CALL_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
TICK = 0.25  # seconds between checks on the other side while parked
NAP = 0.0002  # seconds between looks where there is no futex


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedWord:
    """A 32-bit word in memory that several processes have mapped. Offsets must be multiples of 4."""

    def __init__(self, memory: mmap, offset: int) -> None:
        # The ctypes object keeps the mapping alive, so that its address stays valid.
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = _futex_call()
        self._number = _CALL_NUMBERS.get(platform.machine(), 0)

    @property
    def value(self) -> int:
        """The word as it is now."""
        return self._word.value

    def publish(self, value: int) -> None:
        """Store `value` and wake everybody who waits for the word to change."""
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
    while word.value == seen:
        if time.perf_counter() < spin_end:
            os.sched_yield()
            continue
        left = TICK if deadline is None else min(TICK, deadline - time.monotonic())
        if left <= 0:
            raise ChannelTimeout("nothing came by the deadline")
        word.park(seen, left)
        if word.value == seen:
            check()


def _futex_call() -> Callable[..., int] | None:
    if sys.platform != "linux" or platform.machine() not in _CALL_NUMBERS:
        return None
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return syscall
