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
import traceback
from collections.abc import Callable
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy.cli.processes import descendants, kill_all
from tests.chaos.serve_logs import ServeLogs, check_announced
from tests.chaos.streams import Stream, check_exact, client_of, greedy_or_seeded, longest_wait, read_all
from tests.chaos.strike import Strike
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
        for node in [self.add(), self.add()]:
            node.wait_started()
        port = free_port()
        serve.start("HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        settings = {"model": "demo", "replicas": 2, "routers": 2, "cpus_per_worker": OF_REPLICA, "api_key": KEY}
        self.app: App = deploy(port, **settings)

    def add(self) -> WorkerNode:
        """Start one more node, and return it on its way."""
        self._made += 1
        self.nodes.append(WorkerNode(self.cluster.address, f"spot-{self._made}", CPUS))
        return self.nodes[-1]

    def whole(self) -> None:
        """Wait until both replicas and both routers serve."""
        self.app.wait_whole(90)
        eventually(lambda: routers_running() == 2, "two routers", 60)


async def end_a_node(fleet: Fleet, oracle: list[Stream], node: WorkerNode, notice: Callable[[], object]) -> None:
    """Give notice of a node in the middle of streams: all are exact, and none of them waited for a detection."""
    fleet.logs.news()
    fleet.add().wait_started()  # where what runs on the node finds another place
    strike = Strike(40 * len(oracle), lambda: noticed.append(asyncio.create_task(asyncio.to_thread(notice))))
    noticed: list[asyncio.Task[object]] = []
    async with client_of(fleet.app.url) as client:
        client.headers.update(fleet.app.headers)
        streams = await read_all(client, [stream.asked for stream in oracle], strike)
    struck = strike.struck()
    await noticed[0]
    check_exact(streams, oracle)
    node.wait_ended(60)
    fleet.nodes.remove(node)
    logged = fleet.logs.news()
    assert HANDED_OVER in logged, "no replica was told of it"
    check_announced(logged)
    assert sum(map(int, LET_GO.findall(logged))), "the router of the node let go of no answer"
    print(
        f"longest wait for a token {longest_wait(streams, struck):.2f} s; routers let go of {LET_GO.findall(logged)}",
        flush=True,
    )
    fleet.whole()


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
    async with client_of(fleet.app.url) as client:
        client.headers.update(fleet.app.headers)
        oracle = await read_all(client, [greedy_or_seeded(index, TOKENS) for index in range(STREAMS)])
    check_exact(oracle, oracle)
    began = time.monotonic()
    node = fleet.nodes[0]
    await end_a_node(fleet, oracle, node, lambda: post_notice(fleet, node))
    print(f"POST /drain: {time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    node = fleet.nodes[0]
    await end_a_node(fleet, oracle, node, node.terminate)
    print(f"SIGTERM: {time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    node = fleet.nodes[0]
    await end_a_node(fleet, oracle, node, lambda: run_command(fleet, node))
    print(f"squadron drain: {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    """Run the scenario and leave nothing."""
    code = 1
    try:
        asyncio.run(scenario(Fleet()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        kill_all(descendants())
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
