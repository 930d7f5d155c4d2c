"""Forked workers of a Ray: what they share, what they do not, and which ones Ray starts itself."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import ray

from tests.e2e.harness import FORK_SERVERS, eventually

OWN = {"OMP_NUM_THREADS": "3", "SQUADRON_TEST": "own"}


class Worker:
    """An actor that tells of its process."""

    def about(self) -> dict[str, Any]:
        import random

        import numpy as np
        import torch
        from ray._raylet import ActorClassID, ObjectID, UniqueID

        ids = [kind.from_random().hex() for kind in (UniqueID, ObjectID, ActorClassID)]
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "stdin": os.readlink("/proc/self/fd/0"),
            "drawn": {*ids, str(random.random()), str(np.random.rand()), str(torch.rand(1).item())},
        }


@pytest.fixture
def server(serve_port: int) -> int:
    """The process id of the fork server of the Ray that tests share."""
    if not FORK_SERVERS:
        pytest.skip("nothing is forked here: no Linux, or an NVIDIA GPU")
    return FORK_SERVERS[-1].pid


def started(**options: Any) -> dict[str, Any]:
    """What a new worker tells of itself."""
    worker = ray.remote(Worker).options(num_cpus=0, **options).remote()
    about: dict[str, Any] = ray.get(worker.about.remote(), timeout=60)
    return about | {"actor": worker}


def test_forked_workers_are_apart(server: int) -> None:
    one, other = started(), started()
    assert one["parent"] == other["parent"] == server
    assert (one["group"], other["group"]) == (one["pid"], other["pid"])
    assert not one["drawn"] & other["drawn"], "they draw the same numbers"
    for about in (one, other):
        assert about["folder"] == os.getcwd()
        assert about["stdin"] == os.devnull
        assert os.getsid(about["pid"]) == os.getsid(0), "Linux shares the CPUs out by sessions"
        assert "JE_ARROW_MALLOC_CONF" not in about["environment"], "what is the fork server's alone"


def test_a_worker_that_died_is_cleared_away_and_another_one_starts(server: int) -> None:
    victim = started()
    os.kill(victim["pid"], 9)
    eventually(lambda: not psutil.pid_exists(victim["pid"]), "the dead worker is reaped")
    assert started()["parent"] == server


def test_a_worker_with_an_environment_of_its_own_is_started_by_ray(server: int) -> None:
    about = started(runtime_env={"env_vars": OWN})
    assert about["parent"] != server
    assert about["environment"].items() >= OWN.items()
