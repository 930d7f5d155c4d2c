"""What a killed process leaves is ended by the watch that it started; what is let go is not."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from deploy.serve.orphans import end

PARENT = """
import os, subprocess, sys, time, psutil
from deploy.serve.orphans import OrphanWatch
watch = OrphanWatch()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
watch.guard(psutil.Process().children())
if sys.argv[1] == "let go":
    watch.close()
print(child.pid, *[one.pid for one in psutil.Process().children() if one.pid != child.pid], flush=True)
time.sleep(60)
"""


def killed_parent(how: str) -> list[psutil.Process]:
    """Kill a process that guards a child; return the child, and the watch if there still is one."""
    command = [sys.executable, "-c", PARENT, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        left = [psutil.Process(pid) for pid in pids]
        parent.kill()
    return left


def test_a_guarded_process_and_its_watch_end_after_a_killed_parent() -> None:
    left = killed_parent("guard")
    assert len(left) == 2
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def test_what_was_let_go_lives_on() -> None:
    (child,) = killed_parent("let go")
    try:
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()


def test_a_later_process_of_the_same_number_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        created = psutil.Process(process.pid).create_time()
        began = time.monotonic()
        end([(process.pid, created - 60.0)], grace=0.0)
        assert time.monotonic() - began < 5
        assert process.poll() is None
        end([(process.pid, created)], grace=0.0)
        assert process.wait(10) == -9
