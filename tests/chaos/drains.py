"""Nodes that end after a notice, on one machine: with replicas and routers on them. Run by test_drains.py.

A process of its own, because a process has one Ray and the other tests have theirs. What tells a handover by
announcement from one by detection is what routers and replicas logged, whenever they ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.chaos.scenario import run_scenario
from tests.chaos.serve_logs import ServeLogs, check_announced
from tests.chaos.traffic import Traffic
from tests.chaos.worker_node import STORE, WorkerNode
from tests.e2e.harness import AS_SERVED, OPEN, App, deploy, eventually, free_port, routers_running
from tests.e2e.ray_head import SQUADRON

STREAMS = 12
TOKENS = 250
CPUS, OF_REPLICA = 3, 2.75  # leave room for one router beside each replica
KEY = "sk-operator"
HANDED_OVER = "is to go, and hands over what it runs"
LET_GO = re.compile(r"this router leaves: (\d+) answers go on elsewhere")


class Fleet:
    """A head with nothing but the proxy, nodes that come and go, and an app with two replicas and two routers."""

    def __init__(self) -> None:
        os.environ.update(AS_SERVED | OPEN)
        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False, configure_logging=False)
        self.nodes: list[WorkerNode] = []
        self.logs = ServeLogs(Path(self.cluster.head_node.get_logs_dir_path()))
        self._made = 0
        self.add()
        self.add()
        port = free_port()
        serve.start("HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        settings = {"model": "demo", "replicas": 2, "routers": 2, "cpus_per_worker": OF_REPLICA, "api_key": KEY}
        self.app: App = deploy(port, **settings)

    def add(self) -> None:
        """Start one more node."""
        self._made += 1
        self.nodes.append(WorkerNode(self.cluster.address, f"spot-{self._made}", CPUS))

    def whole(self) -> None:
        """Wait until both replicas and both routers serve."""
        self.app.wait_whole(90)
        eventually(lambda: routers_running() == 2, "two routers", 60)


async def end_a_node(fleet: Fleet, what: str, notice: Callable[[Fleet, WorkerNode], object]) -> None:
    """Give notice of a node under streams that never pause: all are exact, and none of them waits for a detection."""
    began, node = time.monotonic(), fleet.nodes.pop(0)
    fleet.add()  # where what runs on the node finds another place
    fleet.whole()
    traffic = Traffic(fleet.app, STREAMS, TOKENS)
    undisturbed = await traffic.references()
    fleet.logs.news()
    noticed = 0.0

    async def end() -> None:
        nonlocal noticed
        noticed = time.monotonic()
        await asyncio.to_thread(notice, fleet, node)
        await asyncio.to_thread(node.wait_ended, 60)

    await traffic.during(end)
    traffic.check(undisturbed)
    logged = fleet.logs.news()
    assert HANDED_OVER in logged, "no replica was told of it"
    check_announced(logged)
    let_go = sum(map(int, LET_GO.findall(logged)))
    assert let_go, "the router of the node let go of no answer"
    waited = max(b - a for stream in traffic.ended for a, b in pairwise(stream.times) if b > noticed)
    told = f"longest wait for a token {waited:.2f} s, {let_go} answers let go by the router"
    print(f"{what}: {told}; {time.monotonic() - began:.1f} s in all", flush=True)


def post_notice(fleet: Fleet, node: WorkerNode) -> None:
    """Call the hook as a handler of spot notices does."""
    answer = httpx.post(
        f"{fleet.app.url}/drain", json={"node": node.name, "deadline": 60}, headers=fleet.app.headers, timeout=30
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["nodes"] == [node.node_id]


def run_command(fleet: Fleet, node: WorkerNode) -> None:
    """Run `squadron drain` as a script on the node does."""
    words = ["drain", node.node_id, "--deadline", "60", "--address", fleet.cluster.address]
    run = subprocess.run([sys.executable, "-c", SQUADRON, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert node.node_id in run.stdout


async def scenario(fleet: Fleet) -> None:
    """End one node after the other, each with a replica and a router on it."""
    await end_a_node(fleet, "POST /drain", post_notice)
    await end_a_node(fleet, "SIGTERM", lambda _, node: node.terminate())
    await end_a_node(fleet, "squadron drain", run_command)


if __name__ == "__main__":
    run_scenario(lambda: scenario(Fleet()))
