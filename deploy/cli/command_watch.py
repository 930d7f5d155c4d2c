"""Ends what a killed command would leave behind, and a command whose start takes too long, or that does not hear.

Ray waits in C++ with Python's lock held: no handler of a signal runs meanwhile, and no thread that had a deadline. A
process that was killed can do nothing about what it started, either. So another process has an eye on the command:
this file, run as a script, which imports nothing heavy.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from secrets import token_hex
from typing import IO, cast

import psutil

MARK = "SQUADRON_COMMAND"  # environment variable of all that a command starts: which one
GRACE = 3.0  # seconds in which orphans may end by themselves
KILL_SECONDS = 10.0  # in which what was killed is gone, unless it hangs in the kernel
STOP_SECONDS = 4.0  # that a command which starts may take to end after a signal
SIGNALS = bytes((signal.SIGINT, signal.SIGTERM))  # as Python writes them to a wake-up descriptor; in no line of text


class CommandWatch:
    """A process that outlives this one for a moment. What is started from now on has its mark, until it is closed.

    descriptor: where Python is to write the numbers of signals (`signal.set_wakeup_fd`), which it does at once.
    """

    def __init__(self) -> None:
        mark, self._before = token_hex(8), os.environ.get(MARK)
        # A session of its own: Ctrl-C and signals to the process group are for others.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, mark, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ[MARK] = mark
        self._pipe = cast("IO[bytes]", self._process.stdin)
        self.pid, self.descriptor = self._process.pid, self._pipe.fileno()
        os.set_blocking(self.descriptor, False)

    def expect(self, seconds: float | None, late: str = "", starting: bool = True) -> None:
        """Have the command ended, and `late` said, unless something else is expected within `seconds`; None = ever.

        starting: whether a signal ends it within `STOP_SECONDS`.
        """
        self._tell([seconds, late, starting])

    def removes(self, folder: str) -> None:
        """Have a folder removed once the command and all that it started have ended, however that comes."""
        self._tell(folder)

    def _tell(self, order: list[object] | str) -> None:
        with suppress(BrokenPipeError, BlockingIOError):  # it was killed
            os.write(self.descriptor, f"{json.dumps(order)}\n".encode())

    def close(self) -> None:
        """Return when nothing is left of what was started."""
        if self._before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = self._before
        self._pipe.close()
        self._process.wait()


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes that were started by the command with a mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end(mark: str, grace: float) -> None:
    """Return when no process has the mark; what still runs after `grace` seconds is killed.

    One that does not die of that, such as in a driver or on a disk that is gone, is told of and left.
    """
    deadline = time.monotonic() + grace
    while left := list(marked(mark)):
        if time.monotonic() >= deadline + KILL_SECONDS:
            pids = ", ".join(str(process.pid) for process in left)
            print(f"Error: killed and still there, in the kernel: process {pids}", file=sys.stderr, flush=True)
            return
        if time.monotonic() >= deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.05)


def watch(mark: str, command: psutil.Process, folders: list[str]) -> None:
    """Read what is expected of the command, and of signals to it, until it has ended or is ended here.

    folders: gets those that are to be removed then.
    """
    due, late, stop, starting, text = math.inf, "", math.inf, True, b""
    while True:
        first = min(due, stop)
        wait = None if first == math.inf else max(0.0, first - time.monotonic())
        if not select.select([0], [], [], wait)[0]:
            said = f"Error: {late}" if due <= stop else "Stopped; what it had started is ended."
            print(said, file=sys.stderr, flush=True)
            with suppress(psutil.NoSuchProcess):
                command.kill()
            return end(mark, 0.0)
        data = os.read(0, 65536)
        if not data:
            return end(mark, GRACE)
        if starting and any(number in data for number in SIGNALS):
            stop = min(stop, time.monotonic() + STOP_SECONDS)
        *lines, text = (text + data.translate(None, SIGNALS)).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if isinstance(order, str):
                folders.append(order)
                continue
            seconds, late, starting = order
            due = math.inf if seconds is None else time.monotonic() + seconds
            stop = stop if starting else math.inf


if __name__ == "__main__":
    made: list[str] = []
    watch(sys.argv[1], psutil.Process(int(sys.argv[2])), made)
    for one in made:
        shutil.rmtree(one, ignore_errors=True)
