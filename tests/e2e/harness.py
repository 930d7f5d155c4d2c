"""A real Ray Serve app on loopback for the tests: start it, ask it, find its processes, kill them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ReplicaState, ServeDeploySchema

from cluster.app import build
from cluster.config_values import GATEWAY
from deploy.serve.environment import LOCAL_RAY
from deploy.serve.fork_server import ForkServer, fork_server
from deploy.serve.lean_ray import lean_node
from tests.lifetime import end_in_good_order

T = TypeVar("T")
APP = "squadron"
FORK_SERVERS: list[ForkServer] = []  # of the Ray that runs
OPEN = {"RAY_AUTH_MODE": "disabled"}
# What `squadron serve` sets for processes that die or hang, and for their share of the machine.
SERVED = ("RAY_SERVE_", "RAY_kill_", "RAY_worker_")
AS_SERVED = {name: value for name, value in LOCAL_RAY.items() if name.startswith(SERVED)}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(check: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """Return the first truthy value of `check()`; fail with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = check()
            if last:
                return last
        except httpx.HTTPError as error:
            last = repr(error)
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout} s: {what}; last seen: {last!r}")


def start_ray(report_seconds: int = 2, **more: Any) -> None:
    """Start a Ray of our own with everything pinned that its defaults would take from the machine.

    report_seconds: how often Ray tells its agent all figures; its 10 s are what a test would have to wait for. The
    agent forgets a gauge after two of these, and Serve says its own again every 10 s: it is told to keep up, or they
    would come and go. more: further arguments of `ray.init`.
    """
    told = {
        "RAY_metrics_report_interval_ms": str(report_seconds * 1000),
        "RAY_SERVE_STATUS_GAUGE_REPORT_INTERVAL_S": str(report_seconds / 2),
    }
    os.environ.update(AS_SERVED | OPEN | told)
    with lean_node(os.environ, verbose=False), _forks():
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
            **more,
        )
    if threading.current_thread() is threading.main_thread():
        end_in_good_order()


@contextmanager
def _forks() -> Iterator[None]:
    """Have workers forked, as `squadron serve` has: by one server at a time, which ends with its Ray."""
    while FORK_SERVERS:
        FORK_SERVERS.pop().close()
    if (server := fork_server()) is None:
        yield
        return
    FORK_SERVERS.append(server)
    with server.forks():
        yield


def start_serve() -> int:
    """Start Serve's proxy on a free loopback port and return the port."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return port


@dataclass
class App:
    """One deployed app. traces: the file that its spans go to, where it has one; grpc_port: likewise, or 0.

    key: an operator's, where it has keys.
    """

    port: int
    replicas: int
    prefix: str = ""
    traces: Path | None = None
    grpc_port: int = 0
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What goes with each request."""
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    @property
    def url(self) -> str:
        """Base address of the HTTP endpoint."""
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def ready(self) -> dict[str, Any]:
        """Return /ready's body, whatever its status."""
        body: dict[str, Any] = httpx.get(f"{self.url}/ready", headers=self.headers, timeout=10).json()
        return body

    def wait_whole(self, timeout: float = 60.0) -> None:
        """Wait until every replica is there and ready."""
        eventually(
            lambda: len(self.ready().get("replicas", [])) == self.replicas and self.ready()["ready"],
            f"{self.replicas} ready replicas",
            timeout,
        )

    def wait_replaced(self, pid: int, timeout: float = 60.0) -> None:
        """Wait until every replica is there and ready, and process `pid` is in none of them."""

        def replaced() -> bool:
            body = self.ready()
            pids = [one for replica in body.get("replicas", []) for one in replica["pids"]]
            return bool(body.get("ready")) and len(body["replicas"]) == self.replicas and pid not in pids

        eventually(replaced, f"{self.replicas} ready replicas without process {pid}", timeout)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of one metric over its labels, those of `labels` having these values."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=10).text.splitlines()
        own = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        values = [float(line.rsplit(" ", 1)[1]) for line in own if all(one in line for one in wanted)]
        assert values, f"no metric {name}"
        return sum(values)


def deploy(port: int, name: str = APP, **settings: Any) -> App:
    """Deploy an app and wait until all its replicas are ready. Other names than the default live under /NAME.

    port: of Serve's proxy, or where the app's own gateways are to listen.
    """
    prefix = "" if name == APP else f"/{name}"
    if settings.get("ingress") == GATEWAY:
        settings = settings | {"port": port}
    serve.run(build(settings), name=name, route_prefix=prefix or "/")
    models = settings.get("models", [{}])
    wanted = sum(one.get("replicas", settings.get("replicas", 1)) for one in models)
    app = App(port, wanted, prefix, key=settings.get("api_key"))
    app.wait_whole()
    return app


def apply_file(*applications: dict[str, Any]) -> None:
    """Hand Serve the content of a config file, as Ray's dashboard does for `serve deploy`; there is none here.

    Apps of the file before that are not in this one are deleted. One that `serve.delete` ends comes back with the
    next controller, which applies the last file again.
    """
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))


def log_folder() -> Path:
    """Return where this process's Ray, and all that runs on it, write their logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def processes(title: str) -> list[psutil.Process]:
    """Return live processes of our own Ray whose title contains `title`, oldest first."""
    told = answers(psutil.Process().children(recursive=True), lambda one: (" ".join(one.cmdline()), one.status()))
    found = [one for one, (words, status) in told if title in words and status != psutil.STATUS_ZOMBIE]
    return sorted(found, key=lambda one: one.create_time())


def answers(
    asked: Iterable[psutil.Process], question: Callable[[psutil.Process], T]
) -> list[tuple[psutil.Process, T]]:
    """What processes tell of themselves, but for those that end meanwhile, as idle workers of Ray do."""
    found = []
    for process in asked:
        with suppress(psutil.NoSuchProcess):
            found.append((process, question(process)))
    return found


def replica_processes() -> list[psutil.Process]:
    """Processes of the replicas (driver worker and scheduler), oldest first."""
    return processes(f"ray::ServeReplica:{APP}:Replica")


def worker_processes() -> list[psutil.Process]:
    """Processes of ranks 1..N-1, oldest first."""
    return processes("ray::WorkerActor")


def router_processes(app: str = APP) -> list[psutil.Process]:
    """Processes of the routers, oldest first."""
    return processes(f"ray::ServeReplica:{app}:Router")


def gateway_processes() -> list[psutil.Process]:
    """Processes of the gateways, oldest first."""
    return processes(f"ray::ServeReplica:{APP}:Gateway")


def routers_running(app: str = APP) -> int:
    """Return how many routers Serve says are running, those that have just died among them."""
    states = serve.status().applications[app].deployments["Router"].replica_states
    return states.get(ReplicaState.RUNNING, 0)


def proxy_processes() -> list[psutil.Process]:
    """Processes of Serve's HTTP proxy."""
    return processes("ray::ProxyActor")


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(process: psutil.Process) -> None:
    """SIGKILL, without mercy or notice."""
    os.kill(process.pid, signal.SIGKILL)
