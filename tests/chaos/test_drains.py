"""Nodes end after a notice: a spot notice over HTTP and by command, SIGTERM of a pod. In a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(420)  # six nodes, one after the other, on a machine that others may use as well
def test_streams_are_handed_over_before_their_node_ends_and_wait_for_no_detection() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos.drains"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    for notice in ("POST /drain", "SIGTERM", "squadron drain"):
        assert f"{notice}: " in run.stdout
