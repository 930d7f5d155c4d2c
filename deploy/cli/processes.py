"""The processes that a command starts, and how it ends them: after Ctrl-C, SIGTERM, or a wait that takes too long."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn, Self

import psutil

from deploy.cli.command_watch import MARK, CommandWatch, marked

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Interrupted(BaseException):
    """The command was stopped; not an `Exception`, so that no library takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """While entered, the first signal raises `Interrupted` in the main thread.

    Until `ready`, the command and all that it started have ended within 5 s of it, whatever it waits for. After the
    first, or once `stopping` is set, a signal kills everything that this process started and ends it. So does an
    `Interrupted` that nobody takes. On leaving, nothing is left of what was started meanwhile.
    """

    def __init__(self) -> None:
        self.stopping = False

    def __enter__(self) -> Self:
        self._watch = CommandWatch()
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Interrupted):
            end_now(128 + error.number)  # in whatever state Ray is: its own end may wait for what is gone
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._watch.close()

    def listen(self) -> None:
        """Take the signals; again after a library has put handlers of its own in place."""
        signal.set_wakeup_fd(self._watch.descriptor, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def within(self, seconds: float, late: str) -> Iterator[None]:
        """End the whole command, saying `late`, when the body takes longer than `seconds`, whatever it waits for."""
        self._watch.expect(seconds, late)
        try:
            yield
        finally:
            self._watch.expect(None)
            self.listen()

    def removes(self, folder: str) -> None:
        """See `CommandWatch.removes`."""
        self._watch.removes(folder)

    def ready(self) -> None:
        """The start is over: from now on a signal asks for an end in good order, which may take its time."""
        self._watch.expect(None, starting=False)

    def started(self) -> list[psutil.Process]:
        """Return every process that this one started, but for the one that watches over it."""
        return [process for process in descendants() if process.pid != self._watch.pid]

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


def end_now(code: int) -> NoReturn:
    """Kill every process that this one started, and end it with `code` without further ado.

    The one that watches over it has no mark: it removes folders then, and ends by itself.
    """
    kill_all(list(marked(os.environ.get(MARK, ""))))
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
