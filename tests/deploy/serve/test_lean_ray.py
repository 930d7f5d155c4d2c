"""Which of Ray's own processes a Ray of our own has."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
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


def ports_told(monkeypatch: pytest.MonkeyPatch, taken: range = range(0), **chosen: Any) -> list[int | None]:
    """The ports of a node's agents, as its start would have had them."""
    monkeypatch.setattr(Node, "__init__", lambda *_, **__: None)
    params = RayParams(**chosen)
    with lean_node({}, verbose=False, taken=taken):
        Node(params, head=True)
    return [params.metrics_agent_port, params.metrics_export_port, params.runtime_env_agent_port]


@pytest.fixture
def by_chance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Linux says which ports anybody gets."""
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(lean_ray, "LOCAL_PORTS", file)
    return file


@pytest.mark.usefixtures("by_chance")
def test_agents_are_told_ports_that_nobody_else_gets_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = ports_told(monkeypatch)
    assert len({*ports}) == 3
    assert all(19999 < port < 32768 for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_agents_get_no_port_of_the_app(monkeypatch: pytest.MonkeyPatch, by_chance: Path) -> None:
    by_chance.write_text("20020\t60999\n")
    ports = ports_told(monkeypatch, taken=range(20000, 20012))
    assert all(20011 < port < 20020 for port in ports)


@pytest.mark.usefixtures("by_chance")
def test_a_port_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, export, environments = ports_told(monkeypatch, metrics_export_port=9100)
    assert export == 9100
    assert agent is not None
    assert environments is not None


def test_agents_choose_for_themselves_where_no_port_is_safe(monkeypatch: pytest.MonkeyPatch, by_chance: Path) -> None:
    for text in ("1024\t65535\n", "", "none"):
        by_chance.write_text(text)
        assert ports_told(monkeypatch) == [None, None, None]
    by_chance.unlink()  # not Linux
    assert ports_told(monkeypatch) == [None, None, None]


@pytest.mark.usefixtures("by_chance")
@pytest.mark.parametrize("name", ["persist_port", "DASHBOARD_AGENT_LISTEN_PORT_NAME"])
def test_a_ray_without_these_names_has_its_agents_choose(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(ray._raylet, name)
    assert ports_told(monkeypatch) == [None, None, None]


@pytest.mark.usefixtures("by_chance")
def test_agents_that_cannot_be_started_in_full_choose_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_ray, "AGENT_NEEDS", ("not_there.at_all",))
    assert ports_told(monkeypatch) == [None, None, None]
