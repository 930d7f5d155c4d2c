"""Forked workers of a Ray: what they share, what they do not, and what happens where they cannot be forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from deploy.serve.worker_shim import ADDRESS, RAYS_OWN
from tests.e2e.harness import FORK_SERVERS, eventually, start_ray

SHIM = Path("deploy/serve/worker_shim.py")
CLEAN = {"OMP_NUM_THREADS": "3", "SQUADRON_TEST": "own"}


class Worker:
    """An actor that tells of its process."""

    def about(self) -> dict[str, Any]:
        import random

        import numpy as np
        import torch
        from ray._raylet import ActorClassID, ObjectID, UniqueID

        kinds = (UniqueID, ObjectID)
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "drawn": [
                *(kind.from_random().hex() for kind in kinds),
                ActorClassID.from_random().hex(),
                random.random(),
                np.random.rand(),
                torch.rand(1).item(),
            ],
        }


@pytest.fixture(scope="module")
def server() -> Iterator[psutil.Process]:
    """The fork server of a Ray that runs."""
    ray.shutdown()
    start_ray()
    yield psutil.Process(FORK_SERVERS[-1]._process.pid)
    ray.shutdown()


def started(**options: Any) -> dict[str, Any]:
    """What a new worker tells of itself."""
    worker = ray.remote(Worker).options(**options).remote()
    about: dict[str, Any] = ray.get(worker.about.remote(), timeout=60)
    return about | {"actor": worker}


def test_forked_workers_are_apart(server: psutil.Process) -> None:
    one, other = started(), started()
    assert one["parent"] == other["parent"] == server.pid
    assert (one["group"], other["group"]) == (one["pid"], other["pid"])
    assert not {*map(str, one["drawn"])} & {*map(str, other["drawn"])}, "they draw the same numbers"
    for about in (one, other):
        assert about["folder"] == os.getcwd()
        assert "JE_ARROW_MALLOC_CONF" not in about["environment"], "what is the fork server's alone"


def test_a_worker_that_died_is_cleared_away_and_another_one_starts(server: psutil.Process) -> None:
    victim = started()
    os.kill(victim["pid"], 9)
    eventually(lambda: not psutil.pid_exists(victim["pid"]), "the dead worker is reaped")
    assert started()["parent"] == server.pid


def test_a_worker_with_an_environment_of_its_own_is_started_by_ray(server: psutil.Process) -> None:
    about = started(runtime_env={"env_vars": CLEAN})
    assert about["parent"] != server.pid
    assert about["environment"].items() >= CLEAN.items()


def test_without_the_fork_server_ray_starts_workers_itself_and_the_others_live_on() -> None:
    ray.shutdown()
    start_ray()
    server = psutil.Process(FORK_SERVERS[-1]._process.pid)
    before = started()
    assert before["parent"] == server.pid
    server.kill()
    server.wait()
    after = started()
    assert after["parent"] not in (server.pid, before["parent"])
    assert ray.get(before["actor"].about.remote(), timeout=60)["pid"] == before["pid"]
    ray.shutdown()


def test_it_ends_with_the_ray_node() -> None:
    ray.shutdown()
    start_ray()
    server = psutil.Process(FORK_SERVERS[-1]._process.pid)
    started()
    (raylet,) = [one for one in psutil.Process().children() if one.name().startswith("raylet")]
    raylet.kill()
    eventually(lambda: server.status() == psutil.STATUS_ZOMBIE, "the fork server ends")
    ray.shutdown()


def test_the_shim_becomes_rays_own_script_where_nobody_answers(tmp_path: Path) -> None:
    rays = tmp_path / "setup_worker.py"
    rays.write_text("import sys; print(sys.argv[1:])")
    environment = os.environ | {ADDRESS: str(tmp_path / "nobody"), RAYS_OWN: str(rays)}
    arguments = ["default_worker.py", "--language=PYTHON"]
    done = subprocess.run([sys.executable, SHIM, *arguments], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(arguments)
    assert done.stderr == ""
