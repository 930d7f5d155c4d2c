"""Pictures of the dashboards, of real figures: an app under load, a real Prometheus, and each panel's own queries.

`python -m tests.bench.dashboards [--seconds 150] [--output docs/pictures]` serves the demo model on this machine,
asks it for all kinds of things, kills a replica, and draws what Grafana would. Needs `prometheus` (on Debian
`apt-get install prometheus`) and matplotlib (`pip install -e '.[pictures]'`).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from pathlib import Path

import httpx
import ray
import yaml
from ray import serve

from cluster.admission.keys import hash_key, new_key
from cluster.app import build
from deploy.chart.__main__ import OBSERVABILITY
from deploy.chart.files import DASHBOARDS
from tests.bench.all_kinds import Target, load
from tests.bench.panels import Answer, draw
from tests.bench.prometheus import Line, Prometheus
from tests.e2e.harness import APP, eventually, free_port, kill, replica_processes, start_ray, start_serve
from tests.promql import filled

EVERY = "30s"  # for Grafana's rate interval
SETTLES = 30.0  # seconds until Ray has told all there is
RULES = OBSERVABILITY / "squadron.rules.yaml"
TENANTS = ("team-a", "team-b", "trial")
SETTINGS = {
    "model": "demo",
    "replicas": 2,
    "tensor_parallel_size": 2,
    "cpus_per_worker": 0.5,
    "routers": 2,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 96,
    "max_model_len": 1024,
    "num_kv_blocks": 72,
    "drain_timeout": 5,
}


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="of load")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"), help="folder for the pictures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    target = start(Path(tempfile.mkdtemp(prefix="squadron-pictures-")))
    try:
        with Prometheus([metrics_target()], RULES) as prometheus:
            disturbed_load(target, arguments.seconds)
            print("alerts that are not quiet:", {n: s for n, s in prometheus.alerts().items() if s != "inactive"})
            answer = answers_of(prometheus, arguments.seconds + SETTLES)
            for name, dashboard in DASHBOARDS.items():
                file = arguments.output / f"dashboard-{name}.png"
                empty = draw(dashboard, answer, file)
                print(f"{file}: {file.stat().st_size // 1000} kB; without data: {', '.join(empty) or 'none'}")
    finally:
        serve.shutdown()
        ray.shutdown()


def start(folder: Path) -> Target:
    """Start Ray and an app with tenants, a gRPC port and batches; `folder` keeps these."""
    start_ray(report_seconds=10, _metrics_export_port=free_port())
    keys = {tenant: new_key() for tenant in TENANTS}
    entries = [{"tenant": tenant, "key_sha256": hash_key(key).hex()} for tenant, key in keys.items()]
    entries[-1]["requests_per_minute"] = 6
    (folder / "keys.yaml").write_text(yaml.safe_dump(entries))
    port, grpc_port = start_serve(), free_port()
    files = {
        "api_key_file": str(folder / "keys.yaml"),
        "metrics_key": new_key(),
        "batch_dir": str(folder / "batches"),
    }
    serve.run(build({**SETTINGS, **files, "grpc_port": grpc_port}), name=APP)
    target = Target(f"http://127.0.0.1:{port}", grpc_port, keys, files["metrics_key"])
    eventually(lambda: _replicas(target) == SETTINGS["replicas"], "all replicas are ready", 90)
    return target


def _replicas(target: Target) -> int:
    headers = {"Authorization": f"Bearer {target.metrics_key}"}
    return len(httpx.get(f"{target.url}/ready", headers=headers, timeout=10).json().get("replicas", []))


def metrics_target() -> str:
    """Return where Ray's agent of this machine shows the figures of all processes."""
    (node,) = ray.nodes()
    return f"127.0.0.1:{node['MetricsExportPort']}"


def disturbed_load(target: Target, seconds: float) -> None:
    """Ask for so many seconds, kill a replica after half of them, and wait until Ray has told all of it."""
    killer = threading.Timer(seconds / 2, lambda: kill(replica_processes()[0]))
    killer.start()
    asyncio.run(load(target, seconds))
    killer.join()
    threading.Event().wait(SETTLES)


def answers_of(prometheus: Prometheus, seconds: float) -> Answer:
    """Return what asks for a query's series over the last seconds."""
    end = float(int(time.time()))

    def answer(expr: str) -> list[Line]:
        return prometheus.over(filled(expr, EVERY, f"{int(seconds)}s"), end - seconds, end)

    return answer


if __name__ == "__main__":
    main()
