"""Makes a Ray of our own start with the processes that somebody uses, and wait for none that may come later.

Each process takes most of a second of a core to start.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray._private import utils
from ray._private.node import Node

USAGE_STATS = "RAY_USAGE_STATS_ENABLED"
AGENT_CHECK = "get_dashboard_dependency_error"
# Source: ray/dashboard/optional_deps.py.
AGENT_NEEDS = (
    "aiohttp",
    "aiohttp_cors",
    "grpc",
    "opencensus",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.proto",
    "prometheus_client",
    "pydantic",
)
MONITOR, API_SERVER, LOG_MONITOR = "start_monitor", "start_api_server", "start_log_monitor"  # methods of Ray's node
SIGTERM = "set_sigterm_handler"  # of Ray's utilities: would have a node drain itself instead of what we do
NODE, RAYLET = "__init__", "start_raylet"  # likewise
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, PORTS_TRIED = 20000, 50  # workers of `ray start` listen below
NO_PORT = -1  # what Ray's agent says of a service that it does not have
PERSIST, PAGE = "persist_port", "DASHBOARD_AGENT_LISTEN_PORT_NAME"  # of Ray's compiled part


@contextmanager
def lean_node(environment: Mapping[str, str], verbose: bool, taken: Collection[int] = ()) -> Iterator[None]:
    """While entered, a Ray that is started in this process has only what somebody uses.

    Never the autoscaler: there is one node. No dashboard head: without a dashboard all that it does is to send Ray's
    usage statistics, so it stays where `environment` turns those on. No log monitor unless `verbose`: it shows the
    logs of workers on the terminal. The node does not wait for its agents (`_told_ports`), which get none of the
    ports `taken`. Whatever Ray does not do by these names stays as it is.
    """
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [(Node, MONITOR, _start_nothing)]
    named = hasattr(Node, RAYLET) and all(hasattr(ray._raylet, name) for name in (PERSIST, PAGE))
    if named and all(_installed(name) for name in AGENT_NEEDS):
        replaced.append((Node, NODE, _told_ports(getattr(Node, NODE), taken)))
        replaced.append((Node, RAYLET, _without_agents_page(getattr(Node, RAYLET))))
    if environment.get(USAGE_STATS) != "1":
        replaced.append((Node, API_SERVER, _without_page))
    if not verbose:
        replaced.append((Node, LOG_MONITOR, _start_nothing))
    replaced.append((utils, SIGTERM, lambda handler: None))
    looked = getattr(utils, AGENT_CHECK, None)
    if looked is not None:
        replaced.append((utils, AGENT_CHECK, partial(_agent_error, looked)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced if hasattr(owner, name)]
    for owner, name, function in replaced:
        if hasattr(owner, name):
            setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _told_ports(begin: Callable[..., None], taken: Collection[int]) -> Callable[..., None]:
    """Return Ray's `Node.__init__` with ports of the node's agents chosen here, where nobody chose others.

    Else each agent chooses its own, and Ray's node ends itself when it has not heard of them within 15 s, which takes
    a busy machine longer: they import for seconds of a core. See https://github.com/ray-project/ray/issues/65983.
    """

    def begin_with_ports(node: Any, ray_params: Any, *others: Any, **more: Any) -> None:
        ports = iter(_quiet_ports(len(AGENT_PORTS), taken))
        for name in AGENT_PORTS:
            if getattr(ray_params, name, 0) is None:
                setattr(ray_params, name, next(ports, None))
        begin(node, ray_params, *others, **more)

    return begin_with_ports


def _without_agents_page(start: Callable[..., None]) -> Callable[..., None]:
    """Return Ray's `Node.start_raylet` for an agent that serves nothing over HTTP, as far as the node knows.

    Ray's node waits for the port of that, too, whichever was chosen. Jobs and the dashboard ask there; a Ray of our
    own has neither.
    """

    def start_without_page(node: Any, *others: Any, **more: Any) -> None:
        session, number = getattr(node, "_session_dir", None), getattr(node, "_node_id", None)
        if session is not None and number is not None:
            getattr(ray._raylet, PERSIST)(session, number, getattr(ray._raylet, PAGE), NO_PORT)
        start(node, *others, **more)

    return start_without_page


def _quiet_ports(number: int, taken: Collection[int]) -> list[int]:
    """Return `number` free ports, or fewer, that nobody gets by asking for any free one, and none of those `taken`.

    The agents listen seconds later, and an agent that finds its port taken takes Ray's node with it.
    """
    try:
        end = int(LOCAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    tried = random.sample(range(FIRST_PORT, end), min(PORTS_TRIED, end - FIRST_PORT)) if end > FIRST_PORT else []
    return [port for port in tried if port not in taken and _free(port)][:number]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _agent_error(looked: Callable[[], ImportError | None]) -> ImportError | None:
    """Return why Ray's agent cannot be started in full; None where all that it needs is installed.

    looked: Ray's own check, which imports all of it into this process, where nobody uses it.
    """
    return None if all(_installed(name) for name in AGENT_NEEDS) else looked()


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def _start_nothing(node: Any) -> None:
    pass


def _without_page(node: Any, **_: Any) -> None:
    node._webui_url = ""  # as the dashboard head would have said
