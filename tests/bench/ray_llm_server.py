"""Ray Serve LLM with two replicas of a model, for `tests.bench.ray_llm`: run by the Python that has it installed.

    PYTHON tests/bench/ray_llm_server.py MODEL PORT

Prints a line of JSON when something changes: replicas by their state, as Serve has it, and the processes of those
that serve. Ends with its stdin. Imports nothing of this repository.
"""

import json
import os
import sys
import threading
import time

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
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


def serve_model(model: str, port: int) -> None:
    """Serve with one CPU a replica, as Squadron's replicas have in the same comparison."""
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
        deployment_config={"num_replicas": 2},
        placement_group_config={"bundles": [{"CPU": 1}], "strategy": "PACK"},
        engine_kwargs={"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 64, "enforce_eager": True},
        runtime_env={"env_vars": SETTINGS},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="demo", blocking=False)


def states() -> dict[str, int]:
    """Return how many replicas of the model are in each state."""
    from ray import serve

    deployments = serve.status().applications["demo"].deployments
    (found,) = [one for name, one in deployments.items() if "LLMServer" in name]
    return {str(getattr(state, "value", state)): count for state, count in found.replica_states.items()}


def main(model: str, port: str) -> None:
    """Serve until stdin ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray and vLLM talk on stdout
    began = time.monotonic()
    serve_model(model, int(port))
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
