"""A command that starts ends when it is told to or is late, whatever it waits for, with all that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.cli import command_watch

PARENT = """
import ctypes, subprocess, sys, time
from deploy.cli.processes import Interrupts

def deaf():  # as in Ray's library: no handler runs, and no other thread
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

with Interrupts() as interrupts:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(child.pid, interrupts._watch.pid, flush=True)
    {body}
"""


class Parent:
    """A process that has started another one, and does `body`."""

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(body=body)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.left = [psutil.Process(int(pid)) for pid in self.process.stdout.readline().split()]

    def ended(self) -> tuple[int, str]:
        """Return its exit code and what it said once it and all that it started have ended."""
        said = "".join(self.process.communicate(timeout=30))
        _, alive = psutil.wait_procs(self.left, timeout=20)
        assert not alive
        return self.process.returncode, said


@pytest.fixture
def parents() -> Iterator[list[Parent]]:
    made: list[Parent] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deaf_command_ends_when_it_is_told_to(parents: list[Parent], number: signal.Signals) -> None:
    parents.append(parent := Parent("deaf()"))
    while psutil.Process(parent.process.pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)  # it hears until it waits
    parent.process.send_signal(number)
    code, said = parent.ended()
    assert (code, said) == (-signal.SIGKILL, "Stopped; what it had started is ended.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_hears_ends_by_itself(parents: list[Parent], number: signal.Signals) -> None:
    parents.append(parent := Parent("time.sleep(60)"))
    parent.process.send_signal(number)
    assert parent.ended() == (128 + number, "")


@pytest.mark.parametrize("wait", ["deaf()", "time.sleep(60)"])
def test_what_does_not_come_in_time_is_told_and_ends_it(parents: list[Parent], wait: str) -> None:
    parents.append(parent := Parent(f"with interrupts.within(0.1, 'Ray did not answer'): {wait}"))
    assert parent.ended() == (-signal.SIGKILL, "Error: Ray did not answer\n")


def test_what_comes_in_time_is_not(parents: list[Parent]) -> None:
    parents.append(parent := Parent("with interrupts.within(0.5, 'late'): pass\n    time.sleep(1)"))
    assert parent.ended() == (0, "")


def test_one_that_is_ready_may_take_its_time(parents: list[Parent]) -> None:
    stops = "time.sleep(5); print('in order')"
    runs = "print('runs', flush=True); time.sleep(60)"
    parents.append(parent := Parent(f"interrupts.ready()\n    try: {runs}\n    except BaseException: {stops}"))
    assert parent.process.stdout.readline() == "runs\n"
    parent.process.send_signal(signal.SIGINT)
    assert parent.ended() == (0, "in order\n")


STOPS = """interrupts.ready()
    try: print('runs', flush=True); time.sleep(60)
    except BaseException: print('stops', flush=True); time.sleep(60)"""


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGINT, signal.SIGKILL], -signal.SIGKILL),
    ],
)
def test_its_folders_are_removed_however_its_stop_ends(
    parents: list[Parent], tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    parents.append(parent := Parent(f"interrupts.removes({str(made)!r}); {STOPS}"))
    first, second = signals
    assert parent.process.stdout.readline() == "runs\n"
    parent.process.send_signal(first)
    assert parent.process.stdout.readline() == "stops\n"
    assert made.exists()
    parent.process.send_signal(second)
    assert parent.ended() == (code, "")
    assert not made.exists()


def test_nothing_outlives_a_killed_command(parents: list[Parent]) -> None:
    parents.append(parent := Parent("time.sleep(60)"))
    parent.process.kill()
    assert parent.ended() == (-signal.SIGKILL, "")


class Hanging:
    """A process that a driver holds in the kernel: no signal ends it."""

    pid = 7

    def kill(self) -> None:
        pass


def test_what_cannot_be_killed_is_told_and_not_waited_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command_watch, "marked", lambda mark: [Hanging()])
    monkeypatch.setattr(command_watch, "KILL_SECONDS", 0.1)
    command_watch.end("mark", 0.0)
    assert capsys.readouterr().err == "Error: killed and still there, in the kernel: process 7\n"
