"""An app from a config file, told as `serve deploy` tells it: another number of replicas under load (FAULTS, 39).

And a file whose app cannot be built, which is rolled back to the one before (FAULTS, 40).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client

from cluster.lifecycle.leases import ReplicaWatch
from cluster.lifecycle.rollback import AppMemory
from cluster.wire.link import ReplicaLink
from cluster.wire.replica_messages import Draining
from cluster.wire.router_messages import Ping
from cluster.wire.tcp import connect
from tests.chaos.serve_logs import ServeLogs, check_announced
from tests.chaos.traffic import Traffic
from tests.e2e.harness import App, apply_file, eventually, gone, log_folder, processes, router_processes

NAME = "from-file"
STREAMS = 3
ARGS = {"model": "demo", "dtype": "float32", "cpus_per_worker": 0.25, "drain_timeout": 30}


def apply(replicas: int = 2, **changes: Any) -> None:
    apply_file(
        {
            "name": NAME,
            "route_prefix": f"/{NAME}",
            "import_path": "cluster.app:build",
            "args": ARGS | changes,
            "deployments": [{"name": "Replica", "num_replicas": replicas}],
        }
    )


def applied() -> dict[str, Any]:
    """Return the `args` of the file that is in force."""
    return dict(_get_global_client().get_serve_details()["applications"][NAME]["deployed_app_config"]["args"])


def status() -> str:
    return str(serve.status().applications[NAME].status.value)


@pytest.fixture(scope="module")
def app(serve_port: int) -> Iterator[App]:
    app = App(serve_port, 2, f"/{NAME}")
    apply()
    eventually(lambda: status() == "RUNNING", "the app runs", 90)
    app.wait_whole()
    yield app
    apply_file()
    eventually(lambda: NAME not in serve.status().applications, "the app is gone", 60)


async def scale(app: App, replicas: int) -> None:
    """Ask for that many copies and wait until they serve, and the processes of no others are there."""
    await asyncio.to_thread(apply, replicas)
    app.replicas = replicas
    await asyncio.to_thread(app.wait_whole)
    await asyncio.to_thread(eventually, lambda: len(copies()) == replicas, f"{replicas} processes")


def copies() -> set[int]:
    return {process.pid for process in processes(f"ray::ServeReplica:{NAME}:Replica")}


async def test_copies_stop_and_start_without_a_restart_of_the_others_or_a_lost_stream(app: App) -> None:
    before, routers = copies(), [router.pid for router in router_processes(NAME)]
    traffic = Traffic(app, STREAMS, tokens=200)
    undisturbed, logs = await traffic.references(), ServeLogs(log_folder())
    logs.news()

    async def down_and_up() -> None:
        await scale(app, 1)
        (kept,) = copies()
        assert kept in before, "the copy that stays was restarted"
        # One that is about to end has no name any more, and is no zombie yet.
        await asyncio.to_thread(eventually, lambda: all(map(gone, before - {kept})), "the other copy has ended", 5)
        await scale(app, 2)
        assert kept in copies(), "the copy that was there was restarted"

    await traffic.during(down_and_up)
    traffic.check(undisturbed)
    check_announced(logs.news())
    assert [router.pid for router in router_processes(NAME)] == routers, "the routers were restarted"


async def linked_to_all(app: App) -> dict[str, ReplicaLink]:
    """Link up with each replica as one more router does; returns the links by replica."""
    links: dict[str, ReplicaLink] = {}
    handle = serve.get_deployment_handle("Replica", app_name=NAME).options(stream=True)
    watch = ReplicaWatch(asyncio.get_running_loop(), lambda _: None)
    node = ray.get_runtime_context().get_node_id()
    while len(links) < app.replicas:
        announcement = await anext(handle.lease.remote("a router of this test", node, watch=watch))
        watch.known.add(announcement.replica_id)
        links[announcement.replica_id] = await connect(announcement.address, "a router of this test")
    return links


async def until_it_leaves(link: ReplicaLink) -> str:
    """Return once a replica says that it is to go."""
    while not isinstance(await link.receive(), Draining):
        link.send(Ping())
    return link.replica_id


async def test_a_replica_that_serve_stops_says_so_itself_before_its_links_end(app: App) -> None:
    links = await linked_to_all(app)
    try:
        leaving = [asyncio.create_task(until_it_leaves(link)) for link in links.values()]
        await asyncio.to_thread(apply, 1)
        done, others = await asyncio.wait(leaving, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        (gone_one,) = [task.result() for task in done]
        assert not links[gone_one].closed, "it ended before it said so"
        assert not any(task.done() for task in others)
    finally:
        for task in leaving:
            task.cancel()
        for link in links.values():
            link.close()
            await link.wait_closed()
    app.replicas = 1
    await asyncio.to_thread(app.wait_whole)
    await asyncio.to_thread(eventually, lambda: len(copies()) == 1, "the replica that was to go has gone", 20)
    await scale(app, 2)


def test_a_config_file_that_cannot_be_built_is_rolled_back_to_the_one_before(app: App) -> None:
    before = processes(f"ray::ServeReplica:{NAME}:")
    eventually(lambda: AppMemory(NAME).good, "a router has seen the app whole")
    apply(max_num_seqs=-1)
    eventually(lambda: applied() == ARGS and status() == "RUNNING", "the file before is in force again", 120)
    assert processes(f"ray::ServeReplica:{NAME}:") == before, "copies of the version that served were restarted"
    notice = eventually(lambda: app.ready().get("notice"), "/ready tells of it")
    assert "rolled back" in notice
    assert "max_num_seqs" in notice
    assert httpx.get(f"{app.url}/v1/models", trust_env=False).status_code == 200
