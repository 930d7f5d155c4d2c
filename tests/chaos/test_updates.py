"""Rolling updates and bad updates under load: no stream fails, none is short (FAULTS, 38 to 40)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import serve
from safetensors.torch import load_file, save_file

from cluster.app import build
from cluster.lifecycle.rollback import AppMemory
from deploy.demo import demo_model_path
from engine.errors import CheckpointError
from tests.chaos.serve_logs import ServeLogs, check_announced
from tests.chaos.traffic import Traffic
from tests.e2e.harness import App, deploy, eventually, kill, log_folder, processes

NAME = "updates"
STREAMS = 3
pytestmark = pytest.mark.timeout(400)  # a bad version is tried three times, beside streams and whatever else runs
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "served_model_name": "demo",
    "dtype": "float32",
    "cpus_per_worker": 0.25,
    "drain_timeout": 60,
    "max_num_seqs": 32,
}


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[App]:
    yield deploy(serve_port, NAME, replicas=2, routers=2, **SETTINGS)
    serve.delete(NAME)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, and a tokenizer that calls two tokens by each other's numbers."""
    folder = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("models") / "other")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
    save_file(weights | {name: -weights[name]}, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["x"], vocabulary["v"] = vocabulary["v"], vocabulary["x"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that lacks the weights of a layer, which shows when it is loaded."""
    folder = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("models") / "broken")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def redeploy(app: App, **settings: Any) -> None:
    """Deploy another version, and wait until Serve has replaced the old one or given up."""
    settings = SETTINGS | {"replicas": 2} | settings
    target = serve.RunTarget(build(settings), name=NAME, route_prefix=f"/{NAME}")

    def update() -> None:
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        eventually(lambda: status() in ("RUNNING", "DEPLOY_FAILED"), "the update has ended", 120)

    await asyncio.to_thread(update)
    app.replicas = settings["replicas"]


def status() -> str:
    return serve.status().applications[NAME].status.value


async def test_an_update_with_a_kill_in_its_middle_costs_no_stream_on_either_router(app: App) -> None:
    traffic = Traffic(app, STREAMS)
    undisturbed, old = await traffic.references(), pids(app.ready())

    async def change() -> None:
        update = asyncio.create_task(redeploy(app, routers=2, max_num_seqs=24))
        new = await asyncio.to_thread(
            eventually, lambda: pids(app.ready()) - old, "a replica of the new version serves", 90
        )
        kill(psutil.Process(new.pop()))
        await update

    await traffic.during(change)
    traffic.check(undisturbed)
    # Serve calls an update failed while a copy of the new version is missing: it must not be taken back for that.
    eventually(lambda: status() == "RUNNING" and in_force("max_num_seqs") == 24, "the new version is whole", 60)
    app.wait_whole()
    assert "notice" not in app.ready()


def in_force(setting: str) -> Any:
    """Return a setting of the version with which a router saw the app whole last."""
    good = AppMemory(NAME).good
    return None if good is None else good.args[setting]


def replicas() -> list:
    return processes(f"ray::ServeReplica:{NAME}:Replica")


async def test_a_bad_update_halts_at_one_replica_is_rolled_back_and_says_so(app: App, broken_model: Path) -> None:
    traffic = Traffic(app, STREAMS)
    before, ready = await traffic.references(), app.ready()
    most = 0

    async def change() -> None:
        nonlocal most
        update = asyncio.create_task(redeploy(app, model=str(broken_model)))
        while not update.done():
            most = max(most, len(replicas()))
            await asyncio.sleep(0.1)
        await update
        await asyncio.to_thread(eventually, lambda: status() == "RUNNING", "the update is rolled back", 90)

    await traffic.during(change)
    traffic.check(before)
    assert most == 3, "the bad version was tried by one copy at a time"
    said = eventually(lambda: app.ready().get("notice"), "/ready tells of the failed update")
    assert "an update failed and was rolled back" in said
    assert "model.layers" in said
    assert pids(app.ready()) == pids(ready), "copies of the version that served were restarted"
    lost = replicas()[0]
    kill(lost)
    app.wait_replaced(lost.pid)  # Serve replaces nothing while an update has failed: this is the old version's app


def pids(ready: dict[str, Any]) -> set[int]:
    return {pid for replica in ready["replicas"] for pid in replica["pids"]}


async def test_an_update_to_another_model_mixes_no_answer(app: App, other_model: Path) -> None:
    traffic, logs = Traffic(app, STREAMS), ServeLogs(log_folder())
    before = await traffic.references()
    logs.news()
    await traffic.during(lambda: redeploy(app, model=str(other_model)))
    check_announced(logs.news())
    app.wait_whole()
    after = await traffic.references()
    assert before != after
    traffic.check(before, after)


def test_a_checkpoint_that_was_cut_short_is_refused_before_anything_is_stopped(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model_path(), tmp_path / "short")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or damaged"):
        build(SETTINGS | {"model": str(folder)})
