"""`squadron drain`: which nodes it means without a name, and what it says of those that cannot be drained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.lifecycle.node_drains import DrainError
from deploy import drain as command
from deploy.serve import environment

HEAD, OTHER = "10.0.0.1:6379", "10.9.0.1:6379"


def raylet(gcs: str, node: str) -> SimpleNamespace:
    return SimpleNamespace(
        info={"name": "raylet", "cmdline": ["raylet", f"--gcs-address={gcs}", f"--node_id={node}"]}
    )


@pytest.fixture
def drained(monkeypatch):
    """Each drain that was asked for, with the cluster's address."""
    asked = []

    def drain(name, deadline, address):
        asked.append((name, deadline, address))
        return [name]

    monkeypatch.setattr(command, "drain", drain)
    return asked


@pytest.fixture
def runs_here(monkeypatch):
    def run(*processes):
        monkeypatch.setattr(environment.psutil, "process_iter", lambda _: iter(processes))

    return run


@pytest.mark.parametrize(("address", "used"), [(None, HEAD), ("auto", HEAD), ("head-svc:6379", "head-svc:6379")])
def test_without_a_name_it_is_the_nodes_of_this_machine(runs_here, drained, capsys, address, used):
    runs_here(raylet(HEAD, "c0ffee"), raylet(HEAD, "decaf"), SimpleNamespace(info={"name": "x", "cmdline": None}))
    command.drain_nodes(None, 30.0, address)
    assert drained == [("c0ffee", 30.0, used), ("decaf", 30.0, used)]
    assert capsys.readouterr().out.splitlines()[0] == "node c0ffee is drained: it ends in 30 s"


def test_of_several_clusters_it_is_the_one_that_was_named(runs_here, drained):
    runs_here(raylet(HEAD, "c0ffee"), raylet(OTHER, "decaf"))
    with pytest.raises(DrainError, match=f"any of {HEAD}, {OTHER}"):
        command.drain_nodes(None, 30.0, None)
    command.drain_nodes(None, 30.0, OTHER)
    assert drained == [("decaf", 30.0, OTHER)]


@pytest.mark.parametrize(("address", "says"), [(None, "give its address"), (HEAD, "no node of the cluster at")])
def test_where_none_runs_that_is_said(runs_here, drained, address, says):
    runs_here()
    with pytest.raises(DrainError, match=says):
        command.drain_nodes(None, 30.0, address)
    assert not drained
