"""Copies at replicas that are no homes of an answer any more take it from no router that makes it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.replica import answer_keeper
from cluster.replica.core import ReplicaCore
from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.cluster.responses.test_router_deaths import begin, fetched, stream_of, text_of, undisturbed, until_tokens
from tests.simulator.links import connect_local

LENGTH = 500


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make offers often while an answer runs."""
    monkeypatch.setattr(answer_keeper, "TURN", 0.04)


async def link_anew(router: LabRouter, replica: ReplicaCore) -> None:
    """Break a link, and make it again once the router has seen to its answers without it."""
    replica_id = replica.facts.replica_id
    handle = next(one for one in router.dispatcher.linked if one.replica_id == replica_id)
    handle.link.close("closed", "the link broke")
    tokens = router.dispatcher.counters.tokens
    while handle in router.dispatcher.linked or router.dispatcher.counters.tokens < tokens + 60:
        await asyncio.sleep(0.001)
    router.dispatcher.add_link(await connect_local(replica.serve, router.name))


async def test_a_router_whose_links_were_made_anew_keeps_its_answer(tmp_path):
    async with RouterLab(tmp_path, routers=3, pace=0.002) as lab:
        whole = await undisturbed(lab, max_output_tokens=LENGTH)
        one, *others = lab.routers
        name = await begin(one, max_output_tokens=LENGTH)
        await until_tokens(one, name, 20)
        for replica in lab.replicas[:2]:  # each answer has a home among two of three
            await link_anew(one, replica)
        await stream_of(others[0], name)
        assert text_of(await fetched(others[0], name)) == text_of(whole)
        assert [router.dispatcher.counters.accepted for router in others] == [0, 0]


async def test_an_answer_is_taken_over_once_where_copies_of_former_routers_are_left(tmp_path):
    async with RouterLab(tmp_path, routers=3, pace=0.002) as lab:
        whole = await undisturbed(lab, max_output_tokens=LENGTH)
        one, *others = lab.routers
        name = await begin(one, max_output_tokens=LENGTH)
        await until_tokens(one, name, 20)
        for replica in lab.replicas[:2]:
            await link_anew(one, replica)
        lab.kill(one, successor_after=None)
        await stream_of(others[0], name)
        assert text_of(await fetched(others[0], name)) == text_of(whole)
        assert sum(router.dispatcher.counters.accepted for router in others) == 1
