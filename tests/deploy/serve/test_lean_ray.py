"""Which of Ray's own processes a Ray of our own has."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import utils
from ray._private.node import Node
from ray._private.parameter import RayParams

from deploy.serve import lean_ray
from deploy.serve.lean_ray import lean_node

METHODS = ("start_monitor", "start_api_server", "start_log_monitor")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what a node would have started."""
    names: list[str] = []
    for name in METHODS:
        monkeypatch.setattr(Node, name, lambda _, name=name, **__: names.append(name))
    return names


def begin(node: SimpleNamespace) -> None:
    """Start what Ray's node does, as it does."""
    Node.start_monitor(node)
    Node.start_api_server(node, include_dashboard=False, raise_on_failure=False)
    Node.start_log_monitor(node)


@pytest.mark.parametrize(
    ("environment", "verbose", "expected"),
    [
        ({}, False, []),
        ({"RAY_USAGE_STATS_ENABLED": "0"}, True, ["start_log_monitor"]),
        ({"RAY_USAGE_STATS_ENABLED": "1"}, False, ["start_api_server"]),
    ],
)
def test_a_node_starts_what_somebody_uses(
    started: list[str], environment: dict[str, str], verbose: bool, expected: list[str]
) -> None:
    with lean_node(environment, verbose):
        begin(SimpleNamespace())
    assert started == expected


def test_another_ray_of_this_process_starts_everything(started: list[str]) -> None:
    with pytest.raises(RuntimeError), lean_node({}, verbose=False):
        raise RuntimeError
    begin(SimpleNamespace())
    assert started == list(METHODS)


def test_a_ray_that_has_no_such_method_is_left_alone(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    monkeypatch.delattr(Node, "start_log_monitor")
    monkeypatch.delattr(utils, "get_dashboard_dependency_error")
    with lean_node({}, verbose=False):
        assert not hasattr(Node, "start_log_monitor")
        Node.start_monitor(SimpleNamespace())
    assert started == []
    assert not hasattr(utils, "get_dashboard_dependency_error")


def test_rays_agent_is_started_in_full_where_all_that_it_needs_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = ImportError("no aiohttp")
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: lacks)
    with lean_node({}, verbose=False):
        assert utils.get_dashboard_dependency_error() is None
        monkeypatch.setattr(lean_ray, "AGENT_NEEDS", ("aiohttp", "not_there.at_all"))
        assert utils.get_dashboard_dependency_error() is lacks
    assert utils.get_dashboard_dependency_error() is lacks


def ports_told(monkeypatch: pytest.MonkeyPatch, **chosen: Any) -> list[int | None]:
    """The ports of a node's agents, as its start would have had them."""
    monkeypatch.setattr(Node, "__init__", lambda *_, **__: None)
    params = RayParams(**chosen)
    with lean_node({}, verbose=False):
        Node(params, head=True)
    return [params.metrics_agent_port, params.metrics_export_port, params.runtime_env_agent_port]


def test_agents_are_told_ports_that_nobody_else_gets_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = ports_told(monkeypatch)
    first_by_chance = int(lean_ray.LOCAL_PORTS.read_text().split()[0])
    assert len({*ports}) == 3
    assert all(19999 < port < first_by_chance for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, export, environments = ports_told(monkeypatch, metrics_export_port=9100)
    assert export == 9100
    assert agent is not None
    assert environments is not None


def test_agents_choose_for_themselves_where_no_port_is_safe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_chance = tmp_path / "ip_local_port_range"
    for text in ("1024\t65535\n", "", "none"):
        by_chance.write_text(text)
        monkeypatch.setattr(lean_ray, "LOCAL_PORTS", by_chance)
        assert ports_told(monkeypatch) == [None, None, None]
    monkeypatch.setattr(lean_ray, "LOCAL_PORTS", tmp_path / "not Linux")
    assert ports_told(monkeypatch) == [None, None, None]
    monkeypatch.undo()
    monkeypatch.setattr(lean_ray, "AGENT_NEEDS", ("not_there.at_all",))
    assert ports_told(monkeypatch) == [None, None, None]
