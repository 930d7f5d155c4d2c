"""A process ends with the one that started it, whoever adopts it then."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
CHILD = (
    "import time; from cluster.replica.orphans import watch_parent; "
    "watch_parent(); print(1, flush=True); time.sleep(60)"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); sys.stdin.read()"


def test_a_child_outlives_a_killed_parent_by_no_more_than_a_moment() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        (child,) = psutil.Process(parent.pid).children()
        time.sleep(0.6)  # longer than the watch's period: a parent that lives is no reason to end
        assert child.is_running()
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone, "the child lives on without its parent"
