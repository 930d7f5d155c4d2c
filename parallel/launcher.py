"""Starts the other ranks as processes of this machine, without Ray, and makes sure that none outlives its parent.

Of a death it tells how it came, and whether the kernel may have killed the process for lack of memory.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

from parallel.errors import ChannelError, ParallelError

COUNTERS = Path("/proc/vmstat")  # linux; the line `oom_kill N` counts this machine's kills, those of cgroups included


class MemoryDeaths:
    """Counts the kernel's kills for lack of memory since it was made, where the kernel reports them."""

    def __init__(self, counters: Path = COUNTERS) -> None:
        self._counters = counters
        self._before = _kills(counters)

    def suspicion(self) -> str:
        """Return what to add to the report of a process that was killed; "" where the kernel killed none."""
        kills = _kills(self._counters) - self._before
        if kills <= 0:
            return ""
        processes = "a process" if kills == 1 else f"{kills} processes"
        return f"; out of memory: the kernel has killed {processes} of this machine for it since the group started"


def _kills(counters: Path) -> int:
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


_PR_SET_PDEATHSIG = 1
_EXIT_ORPHAN = 3  # exit status of a rank that found its parent gone
SENTINEL_LEAD = 1.0  # seconds, far more than it takes
MAX_REPORT = 16384  # characters of a rank's last words that are kept
_HIDING_MAIN = threading.Lock()  # two threads that hide it at once would leave it hidden


class LocalWorkerGroup:
    """Ranks 1 to N-1 of a group as child processes of rank 0; they live and die together.

    When the worker group is closed, collected, or this process ends in whatever way, its processes are killed.
    """

    def __init__(self, processes: Sequence[SpawnProcess], reports: Sequence[Connection]) -> None:
        self._processes = tuple(processes)
        self._reports = tuple(reports)
        self._words: dict[int, str] = {}  # rank -> what it said when it failed
        self._reading = threading.Lock()
        self._memory = MemoryDeaths()
        # multiprocessing runs these before it waits for children at exit, so a stopped one cannot hold the exit up.
        self._end = util.Finalize(self, _kill_all, args=(self._processes,), exitpriority=100)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return tuple(process.pid or 0 for process in self._processes)

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit codes of ranks 1, 2, ...; negative for a signal, None while running."""
        return tuple(process.exitcode for process in self._processes)

    def alive(self) -> bool:
        """Whether every rank is running."""
        return all(process.is_alive() for process in self._processes)

    def failure(self) -> str | None:
        """Return which ranks have ended, how and with what last words; None while all are running."""
        ended = []
        for rank, process in enumerate(self._processes, start=1):
            if not process.is_alive():
                memory = self._memory.suspicion() if process.exitcode == -signal.SIGKILL else ""
                how = f"{_how(process.exitcode)}{self._exit_reason(rank)}{memory}"
                ended.append(f"rank {rank} (pid {process.pid}) {how}")
        return "; ".join(ended) or None

    def check(self) -> None:
        """Raise `ChannelError` saying which ranks ended and why, if any did."""
        failure = self.failure()
        if failure is not None:
            raise ChannelError(failure)

    def wait_for_death(self, timeout: float | None = None) -> str | None:
        """Block until a rank ends and return what `failure` says; None after `timeout` seconds."""
        by_sentinel = {process.sentinel: process for process in self._processes}
        for sentinel in connection.wait(list(by_sentinel), timeout):
            # The sentinel is a pipe that the kernel closes a moment before the process can be waited for.
            by_sentinel[cast("int", sentinel)].join(SENTINEL_LEAD)
        return self.failure()

    def join(self, timeout: float) -> bool:
        """Wait until all ranks have ended; return whether they did so within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """End all ranks at once and free what they leave behind. Can be called twice."""
        self._end()
        for rank in range(1, len(self._reports) + 1):
            self._exit_reason(rank)

    def _exit_reason(self, rank: int) -> str:
        with self._reading:  # a thread may wait for a death while another kills
            report = self._reports[rank - 1]
            if rank not in self._words:
                self._words[rank] = _read(report)
                report.close()
            return self._words[rank]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def launch(size: int, target: Callable[..., object], args: Sequence[Any] = ()) -> LocalWorkerGroup:
    """Start ranks 1 to `size - 1`, each as a process that calls `target(rank, *args)`, and return these.

    Rank 0 is the caller. The processes are new interpreters that do not run the caller's main script again, so
    `target` must be a function of an importable module, and `args` must be picklable; scripts need no
    `if __name__ == "__main__"`.

    Raises `ParallelError` for a target that cannot be imported.
    """
    if size < 1:
        raise ValueError(f"a worker group has at least 1 rank, not {size}")
    if target.__module__ == "__main__" or "<" in target.__qualname__:
        raise ParallelError(f"{target.__module__}.{target.__qualname__} cannot be imported by another process")
    context = multiprocessing.get_context("spawn")
    # Linux sends the death signal when the *thread* that started a child ends: only the main thread may ask for it.
    guarded = threading.current_thread() is threading.main_thread()
    processes: list[SpawnProcess] = []
    reports: list[Connection] = []
    try:
        for rank in range(1, size):
            mine, theirs = context.Pipe(duplex=False)
            reports.append(mine)
            process = context.Process(
                target=_run_rank,
                args=(rank, target, tuple(args), theirs, os.getpid() if guarded else None),
                name=f"rank-{rank}",
                daemon=True,
            )
            with theirs, _without_main():
                process.start()
            processes.append(process)
    except BaseException:
        _kill_all(tuple(processes))
        raise
    return LocalWorkerGroup(processes, reports)


def _run_rank(
    rank: int, target: Callable[..., object], args: tuple[Any, ...], report: Connection, guardian: int | None
) -> None:
    # Ctrl-C reaches every process of the terminal; what becomes of the workers is for rank 0 to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(guardian)
    try:
        target(rank, *args)
    except BaseException as error:
        words = "".join(traceback.format_exception_only(error)).strip()[-MAX_REPORT:]
        report.send_bytes(words.encode())
        raise


def _die_with_parent(guardian: int | None) -> None:
    """End this process when its parent ends: by the kernel where it may be asked to, by a watching thread as well."""
    if guardian is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the kernel was asked
            os._exit(_EXIT_ORPHAN)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(_EXIT_ORPHAN)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module from multiprocessing, which would have every child run the user's script again."""
    with _HIDING_MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _kill_all(processes: tuple[SpawnProcess, ...]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name}"


def _read(report: Connection) -> str:
    try:
        return f": {report.recv_bytes().decode()}" if report.poll() else ""
    except EOFError:
        return ""
