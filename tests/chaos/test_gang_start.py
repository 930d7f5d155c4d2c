"""A rank that does not come up: the group's start ends in time, by name, and leaves no actor behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from cluster.replica import worker_group as worker_actor
from cluster.replica.worker_group import RayWorkerGroup
from engine.errors import EngineDeadError
from tests.e2e.harness import eventually, processes

BUNDLES = ({"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.25})


@pytest.fixture
def group(serve_port: int) -> Iterator[PlacementGroup]:
    """Room for three ranks."""
    made = placement_group(list(BUNDLES))
    ray.get(made.ready(), timeout=30)
    yield made
    remove_placement_group(made)


def test_rank_that_finds_no_room_is_named_in_time(group: PlacementGroup) -> None:
    before = {process.pid for process in processes("ray::WorkerActor")}
    with pytest.raises(EngineDeadError, match=r"rank 2 was not started within 10 s"):
        RayWorkerGroup(group, (*BUNDLES[:2], {"CPU": 0.5}), timeout=10)
    eventually(lambda: {process.pid for process in processes("ray::WorkerActor")} <= before, "rank 1 has ended too")


def test_rank_that_dies_in_its_constructor_is_named_at_once(
    group: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed:
        def __init__(self, _log_fields: None) -> None:
            os._exit(1)

        def identity(self) -> None:
            raise AssertionError("it never lives to be asked")

    monkeypatch.setattr(worker_actor, "WorkerActor", Doomed)
    with pytest.raises(EngineDeadError, match="rank 1 died while it was started"):
        RayWorkerGroup(group, BUNDLES, timeout=60)
