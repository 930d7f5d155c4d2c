"""Nodes that die, on one machine: a head and two more raylets, a replica on each of the two. Run by test_nodes.py.

A process of its own, because a process has one Ray and the other tests have theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.chaos.invariants import Invariants, alive
from tests.chaos.scenario import run_scenario
from tests.chaos.streams import Stream, check_exact, client_of, greedy_or_seeded, read_all
from tests.chaos.strike import Strike
from tests.e2e.harness import App, answers, deploy, eventually, free_port, kill, replica_processes

STREAMS = 12
TOKENS = 160
STORE = 80 * 2**20  # bytes, about the least that Ray takes
NODE = {"num_cpus": 2, "object_store_memory": STORE}


def start() -> tuple[Cluster, App]:
    """Start the nodes, and the app with a replica on each of the two that have room for one."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    port = free_port()
    # Proxies of all nodes would share the port, and the one of the dead node, which Ray leaves alone, would spoil it.
    serve.start("HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return cluster, deploy(port, model="demo", replicas=2, cpus_per_worker=2)


async def check_disturbed(app: App, oracle: list[Stream], action: Callable[[], None]) -> None:
    """Run the streams with `action` in their middle: all must be whole and as undisturbed."""
    strike = Strike(20 * len(oracle), action)
    async with client_of(app.url) as client:
        check_exact(await read_all(client, [stream.asked for stream in oracle], strike), oracle)
    assert strike.at, "the streams ended before anything happened"


async def lose_a_raylet(cluster: Cluster, app: App, oracle: list[Stream]) -> None:
    """Kill a node's raylet: its replica goes with it, streams go on, and another node takes the replica's place."""
    victim = replica_processes()[0]
    raylet = victim.parent()
    assert raylet is not None
    assert "raylet" in raylet.name()
    await check_disturbed(app, oracle, lambda: kill(raylet))
    eventually(lambda: not alive([victim.pid]), "the replica of the dead node has ended", timeout=10)
    cluster.add_node(**NODE)
    app.wait_whole()


async def lose_the_gcs(app: App, oracle: list[Stream]) -> None:
    """Kill Ray's control store: who serves goes on to serve, streams that run and requests that come."""
    told = answers(psutil.Process().children(), psutil.Process.name)
    (gcs,) = [process for process, name in told if name.startswith("gcs_server")]
    await check_disturbed(app, oracle, lambda: kill(gcs))
    await check_disturbed(app, oracle, lambda: None)


async def scenario(cluster: Cluster, app: App) -> None:
    """Lose one after the other, with every invariant on."""
    async with client_of(app.url) as client:
        oracle = await read_all(client, [greedy_or_seeded(index, TOKENS) for index in range(STREAMS)])
    check_exact(oracle, oracle)
    async with Invariants(app.url):
        began = time.monotonic()
        await lose_a_raylet(cluster, app, oracle)
        print(f"a raylet was lost and replaced in {time.monotonic() - began:.1f} s", flush=True)
    async with Invariants(app.url):
        # Ray's nodes end themselves after 60 s without it: fewer streams, so that a busy machine has done by then.
        await lose_the_gcs(app, oracle[: STREAMS // 2])
        print("the GCS was lost", flush=True)


if __name__ == "__main__":
    run_scenario(lambda: scenario(*start()))
