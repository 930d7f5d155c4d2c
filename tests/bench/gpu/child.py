"""A part's process: how it ended, and what it said last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

TRACEBACK = "Traceback (most recent call last):\n"
KEPT = 1 << 16  # bytes: longer than any traceback


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. words: its last ones on stderr, "" if it had none."""

    code: int
    words: str = ""

    def __str__(self) -> str:
        """Say it as the reason of a row. The words need not be of what ended it."""
        how = f"ended with code {self.code}" if self.code >= 0 else f"was ended by {_signal(-self.code)}"
        return f"the process of this part {how}" + (f"; its last words: {self.words}" if self.words else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no name
        return f"signal {number}"


@dataclass(slots=True)
class _Passed:
    """The end of what was passed on to this process's stderr."""

    end: bytes = field(default=b"")

    def pass_on(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), KEPT):
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
                self.end = (self.end + chunk)[-KEPT:]


class _HeldSignals:
    """Keeps SIGINT and SIGTERM back while a process is started: nobody has its number yet, to end it by."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # no other hears of signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, lambda number, _: self._came.append(number))

    def release(self) -> None:
        """Let them through, also those that came."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number in self._came:
            signal.raise_signal(number)


def run_group(command: Sequence[str], timeout: float | None) -> Ended:
    """Run a command and return how it ended. Whatever ends the wait ends the command too, with all that it started.

    Raises `subprocess.TimeoutExpired`.
    """
    # Nothing is fetched, so nothing need be waited for where there is no network.
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    passed, held = _Passed(), _HeldSignals()
    try:
        process = subprocess.Popen(command, start_new_session=True, env=environment, stderr=subprocess.PIPE)
    except BaseException:
        held.release()
        raise
    reader = threading.Thread(target=passed.pass_on, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        held.release()
        process.wait(timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)  # what left the group may hold the pipe for ever
    return Ended(process.returncode, exit_reason(passed.end.decode(errors="replace")))


def exit_reason(text: str) -> str:
    """Return the error of the last traceback in `text`, else its last line.

    Errors of CUDA go on for lines after the one that names them.
    """
    *_, last = text.rpartition(TRACEBACK)
    errors = [line for line in last.splitlines() if line.strip() and not line[0].isspace()]
    if not errors:
        return ""
    return errors[0 if TRACEBACK in text else -1]
