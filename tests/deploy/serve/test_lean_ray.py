"""Which of Ray's own processes a Ray of our own has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray._private import utils
from ray._private.node import Node

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
