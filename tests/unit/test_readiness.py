"""What /ready says never disagrees with who would take a request."""

from __future__ import annotations

from cluster.announcement import Announcement
from cluster.link import LOST, LinkAddress
from cluster.readiness import ready_body
from tests.unit.cluster_lab import Lab, until


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
