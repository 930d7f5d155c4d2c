"""Leaves out those of Ray's own processes that have nothing to do for a Ray of our own.

Each takes most of a second of a core to start, and Ray's node waits for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

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


@contextmanager
def lean_node(environment: Mapping[str, str], verbose: bool) -> Iterator[None]:
    """While entered, a Ray that is started in this process has only what somebody uses.

    Never the autoscaler: there is one node. No dashboard head: without a dashboard all that it does is to send Ray's
    usage statistics, so it stays where `environment` turns those on. No log monitor unless `verbose`: it shows the
    logs of workers on the terminal. Whatever Ray does not do by a method of that name stays as it is.
    """
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [(Node, MONITOR, _start_nothing)]
    if environment.get(USAGE_STATS) != "1":
        replaced.append((Node, API_SERVER, _without_page))
    if not verbose:
        replaced.append((Node, LOG_MONITOR, _start_nothing))
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
