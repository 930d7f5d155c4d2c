"""Ray Serve LLM with replicas of a model, for `tests.bench.ray_llm`: run by the Python that has it installed.

    PYTHON tests/bench/ray_llm_server.py MODEL PORT ASKED

ASKED is JSON: the number of `replicas`, the `cpus` of each, the `engine`'s arguments and the replicas' `variables`.
Prints a line of JSON when something changes: replicas by their state, as Serve has it, and the processes of those
that serve. Ends with its stdin. Imports nothing of this repository.
"""

import json
import os
import sys
import threading
import time

SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
TITLE = "ray::ServeReplica:demo:LLMServer"


def processes() -> list[int]:
    """Return the processes of replicas."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and TITLE in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def serve_model(model: str, port: int, asked: dict) -> None:
    """Serve as `asked`."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    memory = 100 * 2**20
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=memory,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": model},
        deployment_config={"num_replicas": asked["replicas"]},
        placement_group_config={"bundles": [{"CPU": asked["cpus"]}], "strategy": "PACK"},
        engine_kwargs=asked["engine"],
        runtime_env={"env_vars": SETTINGS | asked["variables"]},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="demo", blocking=False)


def states() -> dict[str, int]:
    """Return how many replicas of the model are in each state."""
    from ray import serve

    deployments = serve.status().applications["demo"].deployments
    (found,) = [one for name, one in deployments.items() if "LLMServer" in name]
    return {str(getattr(state, "value", state)): count for state, count in found.replica_states.items()}


def main(model: str, port: str, asked: str) -> None:
    """Serve until stdin ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray and vLLM talk on stdout
    began = time.monotonic()
    serve_model(model, int(port), json.loads(asked))
    told = None
    while not over.wait(0.1):
        now = {"states": states(), "pids": processes(), "up_s": time.monotonic() - began}
        if told is None or (now["states"], now["pids"]) != (told["states"], told["pids"]):
            out.write(json.dumps(now) + "\n")
            told = now
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])
