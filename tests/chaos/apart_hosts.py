"""A cluster of three hosts: one is cut off, and then the head is lost. Run by test_hosts.py in a network namespace.

On each of two hosts there are a proxy, a router and a replica. The head keeps Ray's control store on its disk, with
RocksDB, as fault tolerance of the GCS needs it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.chaos.hosts import Host, hosts
from tests.chaos.scenario import run_scenario
from tests.chaos.serve_logs import ServeLogs
from tests.chaos.streams import Stream, check_exact, client_of, greedy_or_seeded, longest_wait, read_all
from tests.chaos.strike import Strike
from tests.chaos.worker_node import STORE, WorkerNode
from tests.e2e.harness import APP, AS_SERVED, OPEN, eventually, kill
from tests.lifetime import DIE_WITH_PARENT

STREAMS, TOKENS = 4, 400  # of each side
PORT, GCS_PORT = 8000, 6379
HEADERS = {"authorization": "Bearer sk-operator"}
CUT = 30.0  # seconds at most: after about 55, Ray takes a host for dead
CPUS, OF_REPLICA = 3, 2.75  # leave room for one router beside each replica
DEPLOY = f"""
import ray
from ray import serve
from cluster.app import build
ray.init(address="{{address}}", log_to_driver=False, configure_logging=False)
serve.start("EveryNode", http_options={{{{"host": "0.0.0.0", "port": {PORT}}}}})
settings = dict(model="demo", replicas=2, routers=2, cpus_per_worker={OF_REPLICA}, api_key="sk-operator")
serve.run(build(settings), name="{APP}", route_prefix="/")
"""
STALLED = re.compile(r"is lost with (\d+) requests: stalled")


class ThreeHosts:
    """The cluster and its app. near: beside the head; far: the one that is cut off."""

    def __init__(self, folder: Path) -> None:
        os.environ.update(AS_SERVED | OPEN)
        self._folder = folder
        self._head_host, self.near, self.far = hosts(3)
        self.address = f"{self._head_host.address}:{GCS_PORT}"
        self.start_head()
        self.logs = ServeLogs(next(self._folder.glob("ray/session_2*/logs")))
        self.nodes = [
            WorkerNode(self.address, name, CPUS, host.within, node_ip_address=host.address)
            for name, host in (("near", self.near), ("far", self.far))
        ]
        deploy = [*self.near.within, sys.executable, "-c", DEPLOY.format(address=self.address)]
        subprocess.run(deploy, check=True, stdout=subprocess.DEVNULL)
        self.wait_whole()

    def start_head(self) -> None:
        """Start it, or start it again on what it has kept."""
        words = ["--head", "--block", f"--port={GCS_PORT}", f"--node-ip-address={self._head_host.address}"]
        words += ["--num-cpus=0", f"--object-store-memory={STORE}", "--include-dashboard=false"]
        words += [f"--temp-dir={self._folder / 'ray'}"]
        ray = DIE_WITH_PARENT + "from ray.scripts.scripts import main; main()"
        kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._folder / "gcs")}
        (self._folder / "gcs").mkdir(exist_ok=True)
        # On a host of its own there is none: Ray would take the nodes' processes for a head that runs.
        (self._folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        command = [*self._head_host.within, sys.executable, "-c", ray, "start", *words]
        with (self._folder / "head.log").open("ab") as log:
            self._head = subprocess.Popen(command, env=os.environ | kept, stdout=log, stderr=log)
        eventually(self._head_answers, "the head has started", 60)

    def kill_head(self) -> None:
        """Kill all of its processes at once, as the loss of its host does: GCS, Serve's controller, a proxy."""
        main = psutil.Process(self._head.pid)
        for process in [*main.children(recursive=True), main]:
            kill(process)
        self._head.wait()

    def ready(self, host: Host) -> dict[str, object]:
        """Return /ready as that host's proxy gives it."""
        body: dict[str, object] = httpx.get(f"{url_of(host)}/ready", headers=HEADERS, timeout=10).json()
        return body

    def wait_whole(self, timeout: float = 240.0) -> set[int]:
        """Wait until the proxies of both hosts reach a router that has both replicas; return these' processes."""

        def whole() -> list[set[int]] | None:
            bodies = [self.ready(host) for host in (self.near, self.far)]
            pids = [{pid for one in body.get("replicas", []) for pid in one["pids"]} for body in bodies]
            states = [[one["state"] for one in body.get("states", [])] for body in bodies]
            return pids if all(one == ["ready", "ready"] for one in states) and pids[0] == pids[1] else None

        found: list[set[int]] = eventually(whole, "both hosts reach both replicas", timeout)
        return found[0]

    def is_alive(self, node: WorkerNode) -> bool:
        """Whether Ray takes a node for alive."""
        ask = f"import ray; from ray._raylet import GcsClient; print(GcsClient(address='{self.address}')"
        ask += f".get_all_node_info()[ray.NodeID.from_hex('{node.node_id}')].state)"
        run = subprocess.run(
            [*self.near.within, sys.executable, "-c", ask], capture_output=True, text=True, check=True
        )
        return run.stdout.strip() == "0"

    def _head_answers(self) -> bool:
        assert self._head.poll() is None, (self._folder / "head.log").read_text()[-3000:]
        ask = f"import socket; socket.create_connection(('{self._head_host.address}', {GCS_PORT}), 5)"
        return subprocess.run([*self.near.within, sys.executable, "-c", ask], capture_output=True).returncode == 0


def url_of(host: Host) -> str:
    """Return the address of a host's proxy."""
    return f"http://{host.outside}:{PORT}"


async def ask(where: list[Host], strike: Callable[[Stream], None] = lambda _: None) -> list[Stream]:
    """Run the streams at each of these hosts' proxies, and return them in order."""
    asked = [greedy_or_seeded(index, TOKENS) for index in range(STREAMS)]

    async def at(host: Host) -> list[Stream]:
        async with client_of(url_of(host)) as client:
            client.headers.update(HEADERS)
            return await read_all(client, asked, strike)

    return [stream for streams in await asyncio.gather(*map(at, where)) for stream in streams]


async def cut_one_off(cluster: ThreeHosts, oracle: list[Stream]) -> None:
    """Cut a host off while streams run on both sides, and heal it while more of them run, or after `CUT`."""

    def cut() -> None:
        cluster.far.cut()
        healing.append(asyncio.get_running_loop().call_later(CUT, cluster.far.heal))

    raylets = [node.raylet.pid for node in cluster.nodes]
    healing: list[asyncio.TimerHandle] = []
    strike = Strike(200, cut)
    streams = await ask([cluster.near, cluster.far], strike)
    check_exact(streams, oracle * 2)
    stranded = sum(map(int, STALLED.findall(cluster.logs.news())))
    assert stranded, "no stream ran on the other side of the cut"
    print(
        f"cut off: {stranded} streams moved, longest wait {longest_wait(streams, strike.struck()):.1f} s", flush=True
    )
    strike = Strike(200, cluster.far.heal)
    check_exact(await ask([cluster.near], strike), oracle)
    strike.struck()
    healing[0].cancel()
    cluster.wait_whole()
    assert [node.raylet.pid for node in cluster.nodes if node.raylet.is_running()] == raylets, "a node was lost"


async def lose_the_head(cluster: ThreeHosts, oracle: list[Stream]) -> None:
    """Lose the head in the middle of streams; who serves goes on to. A new head brings replacements back."""
    strike = Strike(200, cluster.kill_head)
    streams = await ask([cluster.near, cluster.far], strike)
    check_exact(streams, oracle * 2)
    print(f"the head was lost: longest wait {longest_wait(streams, strike.struck()):.1f} s", flush=True)
    check_exact(await ask([cluster.near]), oracle)
    cluster.start_head()
    strike = Strike(200, lambda: kill(psutil.Process(min(before))))
    before = cluster.wait_whole()
    check_exact(await ask([cluster.near, cluster.far], strike), oracle * 2)
    eventually(lambda: min(before) not in cluster.wait_whole(), "the replica was replaced", 90)


async def cut_off_for_good(cluster: ThreeHosts, oracle: list[Stream]) -> None:
    """Cut a host off until Ray takes it for dead, and heal it in the middle of streams: it ends, and says nothing."""
    far = cluster.nodes[1]
    cluster.far.cut()
    began = time.monotonic()
    eventually(lambda: not cluster.is_alive(far), "Ray takes the host for dead", 240)
    print(f"taken for dead after {time.monotonic() - began:.1f} s", flush=True)
    assert far.raylet.is_running(), "it ended by itself"
    strike = Strike(200, cluster.far.heal)
    streams = await ask([cluster.near], strike)
    check_exact(streams, oracle)
    print(f"healed: longest wait {longest_wait(streams, strike.struck()):.1f} s", flush=True)
    far.wait_ended(60)
    assert len(cluster.ready(cluster.near)["replicas"]) == 1


async def scenario(cluster: ThreeHosts) -> None:
    """Go through both, and with `--long` through a cut that takes minutes."""
    oracle = await ask([cluster.near])
    check_exact(oracle, oracle)
    began = time.monotonic()
    await cut_one_off(cluster, oracle)
    print(f"partition: {time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    await lose_the_head(cluster, oracle)
    print(f"head loss: {time.monotonic() - began:.1f} s", flush=True)
    if "--long" in sys.argv:
        await cut_off_for_good(cluster, oracle)


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    run_scenario(lambda: scenario(ThreeHosts(folder)), folder)
