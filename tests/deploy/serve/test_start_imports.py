"""What a process of a server does not import: most of the time to the first token is imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH = ("torch", "transformers")
# process -> what it runs before it does its own work, what it has no use for
PROCESSES = {
    "the command, until Ray's processes are started": (
        "import deploy.main, deploy.serve.command",
        (*TORCH, "ray.serve", "fastapi", "httpx", "pandas", "cluster.app"),
    ),
    "the command, until the app is deployed": (
        "import deploy.main\n"
        "from cluster.app_config import parse_app\n"
        "from deploy.serve.command import Options, Server\n"
        "from deploy.cli.processes import Interrupts\n"
        "app = parse_app({'model': 'demo', 'port': 77})\n"
        "from deploy.cli.model_files import check_files\n"
        "check_files(app)\n"
        "server = Server(app, Options(), Interrupts())\n"
        "server._prepare()\n"
        "from cluster.app import build\n"
        "build(app.settings())",
        (*TORCH, "pandas", "cluster.replica.host", "cluster.http", "cluster.router", "cluster.batch.run", "limits"),
    ),
    "a worker of Ray": ("import cluster.light_serve", (*TORCH, "pandas", "cluster.app")),
    "a gateway": (
        "import cluster.light_serve, cluster.deployments.gateway_host, cluster.ingress.gateway",
        (*TORCH, "pandas", "cluster.http", "cluster.router", "cluster.openai", "cluster.grpc_api", "limits"),
    ),
    "a router": (
        "import cluster.light_serve, cluster.deployments.router_host",
        (*TORCH, "pandas", "cluster.replica.core", "cluster.grpc_api.rpc", "cluster.telemetry.tracing.provider"),
    ),
    "a replica": (
        "import cluster.light_serve, cluster.deployments.replica, cluster.replica.host, cluster.replica.worker_group",
        ("transformers", "pandas", "torch._dynamo", "triton", "xgrammar", "cluster.http", "cluster.router"),
    ),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_nothing_that_it_has_no_use_for(process: str) -> None:
    runs, unused = PROCESSES[process]
    found = f"print([name for name in {unused} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{runs}\n{found}"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "[]"


def test_what_serve_is_imported_without_can_be_imported_later() -> None:
    code = (
        "import sys, types\n"
        "class Installed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pandas':\n"
        "            from importlib.machinery import ModuleSpec\n"
        "            return ModuleSpec(name, self)\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): print('imported')\n"
        "sys.meta_path.insert(0, Installed())\n"
        "import cluster.light_serve\n"
        "print('Serve is here:', 'ray.serve' in sys.modules)\n"
        "import pandas"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == ["Serve is here: True", "imported"], result.stderr[-3000:]
