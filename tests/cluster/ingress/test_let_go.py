"""A router that leaves lets go of its answers: another one goes on with them at once, and with those that come."""

from __future__ import annotations

import asyncio

import pytest

from cluster.answer_log import ANSWER_LOG, KEEPS, AnswerLog
from cluster.ingress.guard import MOST_TRIES
from cluster.ingress.let_go import LetGo
from tests.cluster.cluster_lab import until
from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.cluster.ingress.test_router_loss import ASKED, CARRIERS, said


@pytest.mark.parametrize("kind", ["greedy", "response", "whole"])
async def test_an_answer_is_what_it_would_have_been_without_a_death(tmp_path, kind):
    path, asked = ASKED[kind]
    async with RouterLab(tmp_path, pace=0.001) as lab:
        undisturbed = await said(lab, path, asked)
        leaving, other = lab.routers
        before = leaving.dispatcher.counters.tokens
        asking = [asyncio.create_task(said(lab, path, asked)) for _ in range(4)]
        await until(lambda: leaving.dispatcher.counters.tokens > before + 50)
        live = leaving.dispatcher.num_live
        assert live, "the answers ended before anything happened"
        leaving.letting_go.let_go()
        found = await asyncio.gather(*asking)
        # Who comes later is sent on, too: the proxy may not know yet that this one leaves.
        asked_of = leaving.asked
        found += await asyncio.gather(*(said(lab, path, asked) for _ in range(2)))
        assert leaving.asked > asked_of
        assert leaving.dispatcher.num_live == 0
        assert other.dispatcher.counters.accepted >= live
    assert all(one == undisturbed for one in found)


@CARRIERS
async def test_routers_that_leave_one_after_the_other_have_not_died_of_a_long_prompt(tmp_path, monkeypatch, gateway):
    monkeypatch.setattr("cluster.ingress.router_side.BEAT", 0.05)
    monkeypatch.setattr("cluster.ingress.router_side.NOTE_AFTER", 0.01)
    path, asked = "/v1/completions", ASKED["greedy"][1] | {"max_tokens": 2}
    async with RouterLab(tmp_path, pace=0.4, router_wait=1.0, gateway=gateway) as lab:
        undisturbed = await said(lab, path, asked)
        left: list[LabRouter] = []
        coming: list[asyncio.Task[LabRouter]] = []

        def leave(router: LabRouter) -> None:
            if router not in left and len(left) < MOST_TRIES + 2:
                left.append(router)
                router.leave()
                coming.append(asyncio.create_task(lab.add()))

        lab.on_message = leave
        assert await said(lab, path, asked) == undisturbed
        assert len(left) == MOST_TRIES + 2
        await asyncio.gather(*coming)


async def test_what_nobody_can_go_on_with_is_made_to_its_end():
    sent: list[bytes] = []
    goes_on = asyncio.Event()

    async def app(scope, receive, send) -> None:
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"all of it"})

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    router = LetGo(app)
    unkept = asyncio.create_task(router({"type": "http"}, None, send))
    scope = {"type": "http", KEEPS: True, "state": {ANSWER_LOG: AnswerLog()}}
    kept = asyncio.create_task(router(scope, None, send))
    await asyncio.sleep(0)
    router.let_go()
    await asyncio.wait_for(kept, 5)
    assert not any(sent), "an answer that another one goes on with was touched"
    goes_on.set()
    await unkept
    assert [one for one in sent if one] == [b"all of it"]
