"""A Ray of our own on a machine that is too busy for the agents of its node."""

from __future__ import annotations

import os
import subprocess
import sys

START_SECONDS = 120
STARTS = """
import os
import signal
import threading

import psutil

from deploy.cli.processes import Interrupts
from deploy.serve.environment import prepare_ray

prepare_ray(None)
import ray
from deploy.serve.fork_server import fork_server
from deploy.serve.ray_cluster import LocalRay

AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py")
stopped, started = {}, threading.Event()


def stop_agents():
    while len(stopped) < len(AGENTS) and not started.wait(0.01):
        for process in psutil.Process().children(recursive=True):
            try:
                words = process.cmdline()[:3]
            except psutil.NoSuchProcess:
                continue
            # The end of a word: what is only forked yet has this program in its command.
            for agent in AGENTS:
                if any(word.endswith(agent) for word in words) and agent not in stopped:
                    process.suspend()
                    stopped[agent] = process


stopper = threading.Thread(target=stop_agents)
stopper.start()
with Interrupts() as interrupts:
    forks = fork_server()
    if forks is not None:
        os.kill(forks.pid, signal.SIGSTOP)  # imports, and does not come to its turn
    try:
        cluster = LocalRay(1.0, verbose=False, interrupts=interrupts, forks=forks)
    finally:
        started.set()
        stopper.join()
        for agent in stopped.values():
            agent.resume()
        if forks is not None:
            os.kill(forks.pid, signal.SIGCONT)
    answer = ray.get(ray.remote(lambda: 42).options(num_cpus=1, runtime_env={"env_vars": {"ASKED": "1"}}).remote())
    print(sorted(stopped), answer)
    cluster.stop()
"""


def test_ray_starts_while_neither_its_agents_run_nor_what_forks_its_workers() -> None:
    run = subprocess.run(
        [sys.executable, "-c", STARTS],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
        env={**os.environ, "RAY_worker_register_timeout_seconds": "5"},
    )
    assert run.stdout == "['dashboard/agent.py', 'runtime_env/agent/main.py'] 42\n", run.stdout + run.stderr
