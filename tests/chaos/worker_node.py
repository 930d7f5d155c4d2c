"""A node of a Ray cluster with a main process of its own, as a pod or a spot instance has one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from deploy.drain import NODE_FLAG
from tests.e2e.harness import answers, eventually, free_port
from tests.lifetime import DIE_WITH_PARENT

STORE = 80 * 2**20  # bytes, about the least that Ray takes
START_SECONDS = 60.0


class WorkerNode:
    """`ray start --block` with `cpus` CPUs, whose raylet runs. prefix: of its command.

    One after the other: two that start at once on a machine may take the same names for their sockets.
    """

    def __init__(self, address: str, name: str, cpus: int, prefix: tuple[str, ...] = (), **options: str) -> None:
        self.name = name
        given = {
            "address": address,
            "num-cpus": str(cpus),
            "object-store-memory": str(STORE),
            "node-name": name,
            "dashboard-agent-listen-port": str(free_port()),
            **{key.replace("_", "-"): value for key, value in options.items()},
        }
        words = [f"--{key}={value}" for key, value in given.items()]
        ray = DIE_WITH_PARENT + "from ray.scripts.scripts import main; main()"
        self.main = subprocess.Popen(
            [*prefix, sys.executable, "-c", ray, "start", "--block", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"RAY_ADDRESS": ""},
        )
        self.raylet, self.node_id = eventually(self._raylet, f"node {name} has started", START_SECONDS)

    def terminate(self) -> None:
        """Send SIGTERM to its main process, as Kubernetes does to a pod's."""
        self.main.send_signal(signal.SIGTERM)

    def wait_ended(self, timeout: float) -> None:
        """Wait until its raylet has ended, and with it all that ran there."""
        eventually(lambda: not self.raylet.is_running(), f"node {self.name} has ended", timeout)

    def _raylet(self) -> tuple[psutil.Process, str] | None:
        assert self.main.poll() is None, f"node {self.name} did not start"
        for process, words in answers(psutil.Process(self.main.pid).children(recursive=True), psutil.Process.cmdline):
            if (node := next((word for word in words if word.startswith(NODE_FLAG)), None)) is not None:
                return process, node.removeprefix(NODE_FLAG)
        return None
