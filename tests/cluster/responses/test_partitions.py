"""What a client was told of an answer's end is not undone by a replica or router that was cut off at the time."""

from __future__ import annotations

import asyncio

import pytest

from cluster.replica import answer_keeper
from cluster.replica.core import ReplicaCore
from cluster.router import answer_copies
from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.cluster.responses.test_router_deaths import ASKED, client_of, fetched
from tests.simulator.links import connect_local

NUM = 6  # answers: their names, which keys decide, put copies on any two of the three replicas


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies and offers often."""
    monkeypatch.setattr(answer_copies, "LOOK", 0.01)
    monkeypatch.setattr(answer_keeper, "TURN", 0.01)


async def cut(router: LabRouter, *replicas: ReplicaCore) -> None:
    ids = {one.facts.replica_id for one in replicas}
    for handle in router.dispatcher.linked:
        if handle.replica_id in ids:
            handle.link.close("closed", "the network is cut")
    while any(handle.replica_id in ids for handle in router.dispatcher.linked):
        await asyncio.sleep(0)


async def heal(router: LabRouter, *replicas: ReplicaCore) -> None:
    for one in replicas:
        router.dispatcher.add_link(await connect_local(one.serve, router.name))


async def begun(router: LabRouter, tokens: int) -> list[str]:
    async with client_of(router) as client:
        body = ASKED | {"max_output_tokens": tokens}
        headers = [{"idempotency-key": str(number)} for number in range(NUM)]
        answers = [await client.post("/v1/responses", json=body, headers=one) for one in headers]
    return [str(one.json()["id"]) for one in answers]


async def end(router: LabRouter, names: list[str], way: str) -> None:
    async with client_of(router) as client:
        for name in names:
            path = f"/v1/responses/{name}"
            ending = client.delete(path) if way == "delete" else client.post(f"{path}/cancel")
            assert (await ending).status_code == 200


async def states(routers: list[LabRouter], names: list[str]) -> set[str | int]:
    """What clients hear of these answers now."""
    told: set[str | int] = set()
    for router in routers:
        async with client_of(router) as client:
            for name in names:
                answer = await client.get(f"/v1/responses/{name}")
                told.add(answer.json()["status"] if answer.status_code == 200 else answer.status_code)
    return told


async def a_while() -> None:
    """In which replicas offer what has no router."""
    await asyncio.sleep(4 * answer_keeper.OFFER_AFTER * answer_keeper.TURN)


@pytest.mark.parametrize("dies", [False, True], ids=["its router stays", "its router dies"])
async def test_a_deleted_answer_stays_so_when_a_replica_with_a_copy_comes_back(tmp_path, dies):
    async with RouterLab(tmp_path) as lab:
        one, two = lab.routers
        hidden, names = lab.replicas[0], await begun(one, 5)
        for name in names:
            await fetched(two, name)
        for router in (one, two):
            await cut(router, hidden)
        await end(two, names, "delete")
        if dies:
            lab.kill(two, successor_after=None)
        for router in lab.routers:
            await heal(router, hidden)
        assert await states(lab.routers, names) == {404}
        await a_while()
        assert await states(lab.routers, names) == {404}
        assert [again for again in await begun(one, 5) if again in names] == names, "the keys are free again"
        await fetched(lab.routers[-1], names[0])


@pytest.mark.parametrize(("way", "state"), [("delete", 404), ("cancel", "cancelled")])
async def test_an_answer_that_ends_stays_so_when_its_router_and_a_replica_come_back(tmp_path, way, state):
    async with RouterLab(tmp_path, pace=0.005, replicas="abcd") as lab:
        one, two = lab.routers
        names = await begun(one, 3000)
        await cut(two, *lab.replicas[:2])
        await cut(one, *lab.replicas[2:])
        await a_while()  # its answers have both copies on its side again
        known = [name for name in names if await states([two], [name]) != {404}]
        await end(two, known, way)
        await a_while()
        await heal(two, *lab.replicas[:2])
        await heal(one, *lab.replicas[2:])
        await a_while()
        assert await states([one, two], known) == {state}
        await end(one, [name for name in names if name not in known], way)


async def test_a_deletion_is_confirmed_by_whoever_answers_first_and_refused_where_nobody_does(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_copies, "PATIENCE", 0.3)
    async with RouterLab(tmp_path, routers=1) as lab:
        (router,) = lab.routers
        first, second = (await begun(router, 5))[:2]
        await fetched(router, first)
        for silent in lab.replicas[:2]:
            monkeypatch.setattr(silent._answers, "take", lambda *_: None)
        await end(router, [first], "delete")
        router.dispatcher.ask_for_links(lambda: False, lambda: False)  # as a register of replicas that come back
        await cut(router, *lab.replicas)
        async with client_of(router) as client:
            refused = await client.delete(f"/v1/responses/{second}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
