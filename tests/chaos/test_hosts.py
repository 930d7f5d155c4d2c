"""Hosts that are cut off, and a head that is lost and comes back: a cluster of three in network namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.hosts import NAMESPACE, namespaces_missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(620)  # a head and two nodes on a machine that others may use as well
def test_a_cut_between_hosts_and_the_loss_of_the_head_cost_no_token_on_either_side() -> None:
    if missing := namespaces_missing():
        pytest.skip(f"no network namespaces: {missing}")
    run = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.chaos.apart_hosts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    for stage in ("cut off: ", "the head was lost: ", "head loss: "):
        assert stage in run.stdout
