"""How the processes of a group start and end: what is refused first, and that none outlives its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.config import parse_config
from cluster.lifecycle.leases import listening_host
from cluster.replica.worker_group import start_group
from engine.errors import ConfigError


def test_link_host_that_is_no_address_of_this_machine_is_refused_before_the_model_is_read() -> None:
    config = parse_config({"model": "no-such-folder", "link_host": "203.0.113.1"})
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1") as caught:
        start_group(config)
    assert caught.value.flag == "link_host"


def test_link_host_decides_where_links_are_taken() -> None:
    config = parse_config({"model": "demo", "link_host": "127.0.0.2"})
    assert listening_host(config.link_host, ["some-other-node"]) == "127.0.0.2"


ROOT = Path(__file__).resolve().parents[3]
CHILD = (
    "import time; from cluster.replica.orphans import watch_raylet; "
    "watch_raylet(); print(1, flush=True); time.sleep(60)"
)
PARENT = (
    "import os, subprocess, sys; os.environ['RAY_RAYLET_PID'] = str(os.getpid()); "
    f"subprocess.Popen([sys.executable, '-c', {CHILD!r}]); sys.stdin.read()"
)


def test_a_process_outlives_its_nodes_raylet_by_no_more_than_a_moment() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        (child,) = psutil.Process(parent.pid).children()
        time.sleep(0.6)  # a raylet that lives is no reason to end
        assert child.is_running()
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone, "the process lives on without its raylet"
