"""The processes that a command starts, and how it ends them: after Ctrl-C, SIGTERM, or a wait that takes too long."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn, Self

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANDLER_SECONDS = 1.0  # in which Python's own handler may come to its turn
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Interrupted(BaseException):
    """The command was stopped; not an `Exception`, so that no library takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """While entered, the first signal raises `Interrupted` in the main thread.

    Once `stopping` is set, or after the first, a signal kills everything that this process started and ends it.
    """

    def __init__(self) -> None:
        self.stopping = False

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def listen(self) -> None:
        """Take the signals; again after a library has put handlers of its own in place."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            end_now(128 + number)
        self.stopping = True
        raise Interrupted(number)


@contextmanager
def bounded(seconds: float, alive: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """End the whole command at once when the body takes longer than `seconds`, or `alive()` turns false meanwhile.

    Ray's calls may block for minutes when its processes were killed under them (a supervisor's SIGTERM reaches all).
    """
    done = threading.Event()
    deadline = time.monotonic() + seconds

    def watch() -> None:
        while not done.wait(0.2):
            if time.monotonic() > deadline or not alive():
                end_now(1)

    watcher = threading.Thread(target=watch, name="bounded", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextmanager
def while_ray_joins(seconds: float, late: str) -> Iterator[None]:
    """End the whole command when the body takes longer than `seconds`, saying `late`, or soon after a signal.

    Ray joins a cluster in C++, where it waits for minutes and no handler of Python's runs.
    """
    told, tell = socket.socketpair()
    tell.setblocking(False)
    before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    done = threading.Event()

    def watch() -> None:
        told.settimeout(seconds)
        try:
            number = told.recv(1)  # that of a signal; nothing at the end
        except TimeoutError:
            print(f"Error: {late}", file=sys.stderr, flush=True)
            end_now(1)
        if number and not done.wait(HANDLER_SECONDS):
            end_now(128 + number[0])

    watcher = threading.Thread(target=watch, name="while_ray_joins", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        tell.close()
        watcher.join()
        told.close()


def end_now(code: int) -> NoReturn:
    """Kill every process that this one started, and end it with `code` without further ado."""
    kill_all(descendants())
    sys.stdout.flush()
    os._exit(code)


def descendants() -> list[psutil.Process]:
    """Return every process that this one started, theirs included."""
    return psutil.Process().children(recursive=True)


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL those that still run."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that `descendants` never loses one (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
