"""Leaves out those of Ray's own processes that have nothing to do for a Ray of our own.

Each takes about a second of a core to start, and Ray's node waits for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray._private.node import Node

USAGE_STATS = "RAY_USAGE_STATS_ENABLED"
MONITOR, API_SERVER, LOG_MONITOR = "start_monitor", "start_api_server", "start_log_monitor"  # methods of Ray's node


@contextmanager
def lean_node(environment: Mapping[str, str], verbose: bool) -> Iterator[None]:
    """While entered, a Ray that is started in this process has only what somebody uses.

    Never the autoscaler: there is one node. No dashboard head: without a dashboard all that it does is to send Ray's
    usage statistics, so it stays where `environment` turns those on. No log monitor unless `verbose`: it shows the
    logs of workers on the terminal. What Ray's node has no such method for is started as ever.
    """
    idle: dict[str, Callable[..., None]] = {MONITOR: _start_nothing}
    if environment.get(USAGE_STATS) != "1":
        idle[API_SERVER] = _without_page
    if not verbose:
        idle[LOG_MONITOR] = _start_nothing
    replaced = {name: getattr(Node, name) for name in idle if hasattr(Node, name)}
    for name in replaced:
        setattr(Node, name, idle[name])
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(Node, name, method)


def _start_nothing(node: Any) -> None:
    pass


def _without_page(node: Any, **_: Any) -> None:
    node._webui_url = ""  # as the dashboard head would have said
