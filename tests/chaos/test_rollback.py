"""A config file whose app cannot be built is rolled back to the one before, as `serve deploy` would (FAULTS, 40)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client

from cluster.lifecycle.app_memory import AppMemory
from tests.e2e.harness import App, apply_file, eventually, processes

NAME = "rollback"
ARGS = {"model": "demo", "dtype": "float32", "cpus_per_worker": 0.25, "drain_timeout": 10}


def apply(args: dict[str, Any]) -> None:
    apply_file({"name": NAME, "route_prefix": f"/{NAME}", "import_path": "cluster.app:build", "args": args})


def applied() -> dict[str, Any]:
    """Return the `args` of the file that is in force."""
    return dict(_get_global_client().get_serve_details()["applications"][NAME]["deployed_app_config"]["args"])


def status() -> str:
    return str(serve.status().applications[NAME].status.value)


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[App]:
    apply(ARGS)
    eventually(lambda: status() == "RUNNING", "the app is running", 120)
    app = App(serve_port, replicas=1, prefix=f"/{NAME}")
    app.wait_whole()
    yield app
    apply_file()
    eventually(lambda: NAME not in serve.status().applications, "the app is gone", 60)


def test_a_config_file_that_cannot_be_built_is_rolled_back_to_the_one_before(app: App) -> None:
    before = processes(f"ray::ServeReplica:{NAME}:")
    eventually(lambda: AppMemory(NAME).good, "a router has seen the app whole")
    apply(ARGS | {"max_num_seqs": -1})
    eventually(lambda: applied() == ARGS and status() == "RUNNING", "the file before is in force again", 120)
    assert processes(f"ray::ServeReplica:{NAME}:") == before, "copies of the version that served were restarted"
    notice = eventually(lambda: app.ready().get("notice"), "/ready tells of it")
    assert "rolled back" in notice
    assert "max_num_seqs" in notice
    assert httpx.get(f"{app.url}/v1/models", trust_env=False).status_code == 200
