"""Ends what a killed `squadron serve` would leave behind.

Ray's own processes end with the process that started them, but for its agents, which go on for minutes when Ray's
control store is gone too. A process that was killed by SIGKILL can do nothing about it, so another one waits for its
end: this file, run as a script, which imports nothing heavy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil

GRACE = 3.0  # seconds in which orphans may end by themselves
DONE = "done\n"


class OrphanWatch:
    """A process that outlives this one for a moment. `guard` adds a process to end, `close` ends the watch."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C and signals to the process group are for others.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def guard(self, processes: list[psutil.Process]) -> None:
        """Have these ended when this process is gone; the watch itself may be among them."""
        wanted = [(one.pid, one.create_time()) for one in processes if one.pid != self._process.pid]
        self._send(json.dumps(wanted) + "\n")

    def close(self) -> None:
        """Let go: everything has been ended in good order, or is about to be."""
        self._send(DONE)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the watch process was killed


def end(wanted: list[tuple[int, float]], grace: float = GRACE) -> None:
    """Kill those that still run after `grace` seconds; (pid, creation time) tells a process from a later one."""
    deadline = time.monotonic() + grace
    while (left := [process for one in wanted if (process := _living(*one)) is not None]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _living(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        alive = process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


def main() -> None:
    """Read process ids to end until standard input is closed."""
    wanted: list[tuple[int, float]] = []
    for line in sys.stdin:
        if line == DONE:
            return
        wanted += [(pid, created) for pid, created in json.loads(line)]
    end(wanted)


if __name__ == "__main__":
    main()
