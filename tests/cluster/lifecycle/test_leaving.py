"""Copies learn that they have to leave: from Serve's flag, or from a drain of their node; and which drains count."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cluster.config import parse_config
from cluster.lifecycle import leaving, node_drains
from cluster.lifecycle.leaving import NodeEnd, call_on_leaving, stop_flag
from cluster.lifecycle.node_drains import DrainError, NotDrainedError, drain, ends_soon


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "STOP_POLL_SECONDS", 0.001)
    monkeypatch.setattr(leaving, "LOOK_SECONDS", 0.005)


class Copy:
    """A copy that Serve may stop, on a node that may be drained; told: what it was told, in order."""

    def __init__(self) -> None:
        self.stopped, self.ends, self.looks = False, False, 0
        self.told: list[bool] = []
        self.heard = asyncio.Event()

    def act(self, hand_over: bool) -> None:
        self.told.append(hand_over)
        self.heard.set()

    def look(self) -> bool:
        self.looks += 1
        return self.ends

    def watch(self) -> asyncio.Task[None]:
        return asyncio.create_task(call_on_leaving(self.act, lambda: self.stopped, NodeEnd(self.look)))


async def test_a_stop_is_told_and_the_end_of_the_node_after_it_too() -> None:
    copy = Copy()
    notice = copy.watch()
    copy.stopped = True
    await asyncio.wait_for(copy.heard.wait(), 5)
    assert copy.told == [False]
    copy.ends = True
    await asyncio.wait_for(notice, 5)
    assert copy.told == [False, True]


async def test_the_end_of_the_node_is_told_though_serve_stops_nothing() -> None:
    copy = Copy()
    notice = copy.watch()
    copy.ends = True
    await asyncio.wait_for(notice, 5)
    assert copy.told == [True]


async def test_a_stop_for_the_end_of_the_node_is_told_as_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve is often first to notice the drain for which it stops the copy."""
    monkeypatch.setattr(leaving, "LOOK_SECONDS", 60)
    copy = Copy()
    notice = copy.watch()
    while not copy.looks:
        await asyncio.sleep(0.001)
    copy.ends = copy.stopped = True
    await asyncio.wait_for(notice, 5)
    assert copy.told == [True]


async def test_a_control_store_that_fails_is_said_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([RuntimeError("no leader"), OSError("timed out"), True])

    def ends() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await asyncio.wait_for(NodeEnd(ends).wait(), 5)
    assert caplog.text.count("does not tell whether this node is drained") == 1


class ServeReplica:
    """What Serve keeps of a replica, as far as it is looked into."""

    def __init__(self) -> None:
        self._shutting_down = False


async def test_serves_own_flag_is_found_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    serves = ServeReplica()
    process = SimpleNamespace(actors={1: object(), 2: SimpleNamespace(_replica_impl=serves)})
    monkeypatch.setattr(leaving.ray._private.worker, "global_worker", process)
    told = stop_flag()
    assert told is not None
    assert not told()
    serves._shutting_down = True
    assert told()


async def test_a_serve_that_keeps_it_elsewhere_is_said_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = SimpleNamespace(actors={1: SimpleNamespace(_replica_impl=object())})
    monkeypatch.setattr(leaving.ray._private.worker, "global_worker", process)
    assert stop_flag() is None
    copy = Copy()
    notice = asyncio.create_task(call_on_leaving(copy.act, None, NodeEnd(copy.look)))
    while "does not tell when a replica is to stop" not in caplog.text:
        await asyncio.sleep(0.001)
    copy.ends = True
    await asyncio.wait_for(notice, 5)
    assert copy.told == [True]


@pytest.mark.parametrize(
    ("drains", "ends"),
    [
        ({}, False),
        ({"elsewhere": 5}, False),
        ({"rank 1": 5}, True),
        ({"rank 1": 0}, False),  # who drains without a deadline waits for what runs there
    ],
)
def test_a_drain_with_a_deadline_of_the_node_of_any_rank_is_an_end(drains: dict[str, int], ends: bool) -> None:
    assert ends_soon(["rank 0", "rank 1"], lambda: drains) == ends


class ControlStore:
    """Ray's client of its control store, for three nodes of which one is dead."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, float]] = []
        self.answer = (True, "")

    def get_all_node_info(self, timeout: float) -> dict[bytes, SimpleNamespace]:
        named = [(b"\x01", "10.0.0.1", "head", True, 0), (b"\x02", "10.0.0.2", "spot-a", False, 0)]
        named += [(b"\x03", "10.0.0.3", "spot-b", False, 1), (b"\x04", "10.0.0.2", "spot-a", False, 0)]
        return {
            node_id: SimpleNamespace(
                node_manager_address=address,
                node_manager_hostname=host,
                node_name=address,
                is_head_node=head,
                state=state,
                ALIVE=0,
            )
            for node_id, address, host, head, state in named
        }

    def drain_node(self, node: str, reason: int, message: str, deadline_ms: int, timeout: float) -> tuple[bool, str]:
        self.drained.append((node, deadline_ms / 1000 - time.time()))
        return self.answer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ControlStore:
    store = ControlStore()
    monkeypatch.setattr(node_drains, "_client", lambda _: store)
    return store


@pytest.mark.parametrize(("name", "meant"), [("02", ["02"]), ("10.0.0.2", ["02", "04"]), ("spot-a", ["02", "04"])])
def test_a_node_is_drained_by_any_of_its_names(store: ControlStore, name: str, meant: list[str]) -> None:
    assert drain(name, 120.0) == meant
    assert [node for node, _ in store.drained] == meant
    assert all(100 < left <= 120 for _, left in store.drained)


@pytest.mark.parametrize(
    ("name", "deadline", "field", "says"),
    [
        ("spot-b", 10.0, "node", "no node of this cluster that is alive is called 'spot-b'"),
        ("head", 10.0, "node", "cannot be drained"),
        ("spot-a", -1.0, "deadline", "between 0 and 86400"),
        ("spot-a", float("nan"), "deadline", "between 0 and 86400"),
    ],
)
def test_what_cannot_be_drained_is_refused_by_name(
    store: ControlStore, name: str, deadline: float, field: str, says: str
) -> None:
    with pytest.raises(DrainError, match=says) as refused:
        drain(name, deadline)
    assert refused.value.param == field
    assert not store.drained


def test_a_node_that_refuses_is_said(store: ControlStore) -> None:
    store.answer = (False, "it is busy")
    with pytest.raises(NotDrainedError, match="it is busy"):
        drain("02", 10.0)


@pytest.mark.parametrize(("timeout", "grace"), [(600.0, 595.0), (10.0, 5.0), (5.0, 1.0), (1.0, 0.5)])
def test_streams_get_all_of_the_time_of_a_stop_but_what_serve_needs_itself(timeout, grace):
    assert parse_config({"model": "demo", "drain_timeout": timeout}).stream_grace == grace
