"""Nodes and Ray's control store die (FAULTS 13 and 14): several raylets on one host, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(420)  # three raylets on a machine that others may use as well
def test_a_lost_node_and_a_lost_control_store_cost_no_token() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos.nodes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    assert "a raylet was lost and replaced" in run.stdout
    assert "the GCS was lost" in run.stdout
