"""A replica that dies each time it starts: pauses grow, the reason is told, and it recovers (FAULTS, kills 10)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray import serve

from deploy.demo import demo_model_path
from deploy.status.command import fetch
from deploy.status.report import Condition, ReplicaLine, Report
from tests.e2e.harness import App, deploy, eventually, kill, processes

NAME = "loop"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(demo_model_path(), tmp_path / "model")


@pytest.fixture
def app(serve_port: int, model: Path) -> Iterator[App]:
    settings = {"served_model_name": "demo", "dtype": "float32", "cpus_per_worker": 0.25, "drain_timeout": 5}
    yield deploy(serve_port, NAME, model=str(model), **settings)
    serve.delete(NAME)


def report(app: App) -> Report:
    with httpx.Client(base_url=app.url, timeout=10) as client:
        return fetch(client)


def held_back(app: App) -> ReplicaLine | None:
    """Return the replica that waits for its next try."""
    return next((one for one in report(app).replicas if one.state == "crash-looping" and one.next_try), None)


def failed_starts(app: App) -> float | None:
    """Return what `/metrics` tells of starts that failed in a row, for the alert on crash loops."""
    text = httpx.get(f"{app.url}/metrics", timeout=10).text
    told = re.search(r'^squadron_replica_failed_starts{model_name="demo"} (.*)$', text, re.MULTILINE)
    return None if told is None else float(told[1])


def test_a_crash_loop_slows_down_says_why_and_ends_when_the_cause_does(app: App, model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    kill(processes(f"ray::ServeReplica:{NAME}:Replica")[0])
    waiting: ReplicaLine = eventually(lambda: held_back(app), "a start is held back", 90)
    assert waiting.failed_starts >= 2
    assert "model.safetensors: truncated or damaged" in waiting.reason
    eventually(lambda: (failed_starts(app) or 0) >= 2, "the figure of failed starts grows", 60)
    seen = report(app)
    assert seen.condition is Condition.NOT_READY
    assert any("truncated" in line.reason for line in seen.replicas)
    weights.write_bytes(whole)
    eventually(lambda: report(app).condition is Condition.READY, "it serves again", 90)
    eventually(lambda: failed_starts(app) == 0, "the figure of failed starts is 0 again", 30)
    assert [line.state for line in report(app).replicas] == ["ready"]
