"""A Ray of our own on a machine that is too busy for the agents of its node."""

from __future__ import annotations

import subprocess
import sys

START_SECONDS = 120
STARTS = """
import threading

import psutil

from deploy.serve.environment import prepare_ray

prepare_ray(None)
import ray
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
try:
    cluster = LocalRay(1.0, verbose=False, forks=None)
finally:
    started.set()
    stopper.join()
    for agent in stopped.values():
        agent.resume()
answer = ray.get(ray.remote(lambda: 42).options(num_cpus=1, runtime_env={"env_vars": {"ASKED": "1"}}).remote())
print(sorted(stopped), answer)
cluster.stop()
"""


def test_ray_starts_while_its_agents_do_not_run() -> None:
    run = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert run.stdout == "['dashboard/agent.py', 'runtime_env/agent/main.py'] 42\n", run.stdout + run.stderr
