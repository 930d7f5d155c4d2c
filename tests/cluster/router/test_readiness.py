"""What /ready says never disagrees with who would take a request."""

from __future__ import annotations

import asyncio

from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.readiness import ASLEEP, STALLED, app_ready_body, ready_body, replica_states
from cluster.sleep_orders import SleepOrder
from cluster.wire.link import LOST, Announcement, LinkAddress
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import request


def announced(*names: str) -> list[Announcement]:
    return [Announcement(name, LinkAddress("127.0.0.1", 1, ""), {"weights": 0.5}, 64, (1,)) for name in names]


async def test_ready_lists_the_replicas_that_take_requests() -> None:
    async with Lab() as lab:
        await lab.start("a")
        await lab.start("b")
        body = ready_body(lab.dispatcher, announced("a", "b"))
        assert body["ready"]
        assert [replica["id"] for replica in body["replicas"]] == ["a", "b"]


async def test_a_link_without_a_lease_is_not_ready() -> None:
    async with Lab() as lab:
        await lab.start("a")
        assert ready_body(lab.dispatcher, []) == {"ready": False, "replicas": []}


async def test_a_lease_without_a_link_is_not_ready() -> None:
    async with Lab() as lab:
        await lab.start("a")
        lab.kill("a")
        await until(lambda: lab.lost == [("a", LOST)])
        assert ready_body(lab.dispatcher, announced("a")) == {"ready": False, "replicas": []}


async def test_a_draining_replica_is_not_listed() -> None:
    async with Lab() as lab:
        await lab.start("a")
        await lab.start("b")
        lab.dispatcher.remove_replica("a")
        body = ready_body(lab.dispatcher, announced("a", "b"))
        assert [replica["id"] for replica in body["replicas"]] == ["b"]
        assert body["ready"]


async def test_a_router_that_stops_is_not_ready() -> None:
    async with Lab() as lab:
        await lab.start("a")
        await lab.dispatcher.drain()
        assert not ready_body(lab.dispatcher, announced("a"))["ready"]


async def test_a_replica_whose_step_does_not_end_is_stalled_and_nothing_is_ready() -> None:
    async with Lab(DispatcherConfig(stall_timeout=1.0)) as lab:
        hung = await lab.start("a", steps=0)
        running = asyncio.create_task(lab.collect(request("r", 5, max_tokens=8)))
        await until(lambda: not lab.dispatcher.ready)
        assert ready_body(lab.dispatcher, announced("a")) == {"ready": False, "replicas": []}
        (state,) = replica_states(lab.dispatcher.replicas(), [], None, 0.0)
        assert state.state == STALLED
        assert (state.seconds or 0) >= 1
        hung.executor.allow(100)
        await running
        await until(lambda: lab.dispatcher.ready)


async def test_a_replica_that_sleeps_is_there_and_takes_nothing() -> None:
    async with Lab() as lab:
        replica = await lab.start("a")
        replica.core.obey(SleepOrder().sleeping(2, ""))
        await until(lambda: lab.dispatcher.replicas()[0].asleep == 2)
        assert ready_body(lab.dispatcher, announced("a")) == {"ready": False, "replicas": []}
        (state,) = replica_states(lab.dispatcher.replicas(), [], 1, 0.0)
        assert state.public() | {"id": "a"} == {
            "id": "a", "state": ASLEEP, "sleep_level": 2, "running": 0, "waiting": 0, "kv_usage": 0.0,
        }  # fmt: skip
    bodies = [("one", {"ready": False, "replicas": [], "asleep": 1}), ("two", {"ready": True, "replicas": []})]
    body = app_ready_body(bodies)
    assert (body["ready"], body["asleep"]) == (True, ["one"])
