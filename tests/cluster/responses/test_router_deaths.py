"""Answers that are kept outlive their router and any replica: another router gives them, and goes on with them."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import count
from typing import Any

import httpx
import pytest

from tests.cluster.ingress.router_lab import LabRouter, RouterLab
from tests.openai_app import MODEL, client_for, serving

LENGTH = 200
ASKED = {
    "model": MODEL,
    "input": "once",
    "background": True,
    "max_output_tokens": LENGTH,
    "ignore_eos": True,
    "seed": 5,
}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "once"}],
    "stream": True,
    "max_tokens": LENGTH,
    "ignore_eos": True,
}
TEXT = {"model": MODEL, "prompt": "once", "stream": True, "max_tokens": LENGTH, "ignore_eos": True}


def client_of(router: LabRouter) -> httpx.AsyncClient:
    return client_for(router.app)


async def begin(router: LabRouter, **fields: Any) -> str:
    async with client_of(router) as client:
        answer = await client.post("/v1/responses", json=ASKED | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


async def fetched(router: LabRouter, name: str, status: str = "incomplete") -> dict[str, Any]:
    async with client_of(router) as client:
        while True:
            answer = await client.get(f"/v1/responses/{name}")
            assert answer.status_code == 200, answer.text
            if (body := answer.json())["status"] == status:
                return dict(body)
            await asyncio.sleep(0.01)


async def until_tokens(router: LabRouter, name: str, count: int) -> None:
    """Wait until the router that makes an answer has some tokens of it."""
    while (log := router.dispatcher.log_of(name)) is None or log.longest < count:
        await asyncio.sleep(0.001)


def text_of(body: dict[str, Any]) -> str:
    return str(body["output"][0]["content"][0]["text"])


async def undisturbed(lab: RouterLab, **fields: Any) -> dict[str, Any]:
    router = lab.routers[0]
    return await fetched(router, await begin(router, **fields))


async def stream_of(router: LabRouter, name: str, after: int = -1) -> list[str]:
    async with client_of(router) as client:
        params = {"stream": "true"} | ({} if after < 0 else {"starting_after": str(after)})
        answer = await client.get(f"/v1/responses/{name}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.text.split("\n\n")[:-1]


async def test_any_router_gives_it_while_it_runs_and_after(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one)
        running = asyncio.create_task(stream_of(two, name))
        assert await fetched(two, name) == await fetched(one, name)
        whole = await stream_of(one, name)
        assert await running == whole == await stream_of(two, name)
        assert await stream_of(two, name, 57) == whole[58:]


async def test_another_router_goes_on_with_it_by_itself(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        whole = await undisturbed(lab)
        one, two = lab.routers
        name = await begin(one)
        await until_tokens(one, name, 20)
        lab.kill(one, successor_after=None)
        assert text_of(await fetched(two, name)) == text_of(whole)


@pytest.mark.parametrize(
    ("ahead", "seconds", "tokens", "status"), [(3600.0, 60, LENGTH, "incomplete"), (-3600.0, 1, 3000, "failed")]
)
async def test_its_deadline_goes_by_no_routers_clock(tmp_path, monkeypatch, ahead, seconds, tokens, status):
    """ahead: seconds by which the wall clock of the next router is ahead of the first one's."""
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        real = time.time
        with monkeypatch.context() as first:
            first.setattr("time.time", lambda: real() - ahead)
            async with client_of(one) as client:
                client.headers["x-request-timeout-seconds"] = str(seconds)
                name = (await client.post("/v1/responses", json=ASKED | {"max_output_tokens": tokens})).json()["id"]
        await until_tokens(one, name, 20)
        lab.kill(one, successor_after=None)
        ended = await fetched(two, name, status)
        assert status != "failed" or "deadline" in ended["error"]["message"]


async def test_the_successor_of_the_only_router_goes_on_with_it(tmp_path):
    async with RouterLab(tmp_path, routers=1, pace=0.002) as lab:
        whole = await undisturbed(lab)
        (one,) = lab.routers
        names = [await begin(one) for _ in range(5)]
        await until_tokens(one, names[0], 20)
        lab.kill(one)
        while not lab.routers:
            await asyncio.sleep(0.01)
        (two,) = lab.routers
        for name in names:
            assert text_of(await fetched(two, name)) == text_of(whole)


async def test_one_that_has_ended_outlives_its_router_and_then_the_next(tmp_path):
    async with RouterLab(tmp_path) as lab:
        name = await begin(lab.routers[0])
        whole = await fetched(lab.routers[0], name)
        for _ in range(3):
            lab.kill(lab.routers[0])
            while len(lab.routers) < 2:
                await asyncio.sleep(0.01)
            assert await fetched(lab.routers[0], name) == whole


async def test_it_outlives_a_replica_and_then_its_router(tmp_path):
    """The router has new copies made in place of those that are lost."""
    async with RouterLab(tmp_path, pace=0.002) as lab:
        whole = await undisturbed(lab)
        one, two = lab.routers
        name = await begin(one)
        await until_tokens(one, name, 20)
        await lab.replicas.pop().close()
        lab.kill(one, successor_after=None)
        assert text_of(await fetched(two, name)) == text_of(whole)


async def test_a_stream_from_the_lost_router_goes_on_at_another(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one)
        had: list[str] = []
        async with serving(one.app) as url, httpx.AsyncClient(base_url=url) as client:
            path = f"/v1/responses/{name}"
            async with client.stream("GET", path, params={"stream": "true"}) as answer:
                async for part in answer.aiter_text():
                    had += part.split("\n\n")[:-1]
                    if len(had) > 40:
                        break
        lab.kill(one, successor_after=None)
        rest = await stream_of(two, name, len(had) - 1)
        assert had + rest == await stream_of(two, name)


async def test_it_is_cancelled_at_another_router(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one, max_output_tokens=3000)
        await until_tokens(one, name, 5)
        async with client_of(two) as client:
            answer = await client.post(f"/v1/responses/{name}/cancel")
            assert answer.json()["status"] == "cancelled", answer.text
        for router in (one, two):
            assert (await fetched(router, name, "cancelled"))["id"] == name
        while any(replica.num_requests for replica in lab.replicas):
            await asyncio.sleep(0.01)


async def test_whoever_asks_another_router_after_a_cancel_hears_of_it_at_once(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one, max_output_tokens=3000)
        await until_tokens(one, name, 5)
        async with client_of(one) as client, client_of(two) as other:
            assert (await client.post(f"/v1/responses/{name}/cancel")).json()["status"] == "cancelled"
            assert (await other.get(f"/v1/responses/{name}")).json()["status"] == "cancelled"


async def test_who_waits_for_a_previous_response_follows_it_to_another_router(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one, max_output_tokens=3000)
        await until_tokens(one, name, 5)
        async with client_of(one) as client, client_of(two) as other:
            body = {"model": MODEL, "input": "more", "previous_response_id": name}
            waiting = asyncio.create_task(client.post("/v1/responses", json=body))
            assert (await other.post(f"/v1/responses/{name}/cancel")).status_code == 200
            answer = await waiting
        assert answer.status_code == 400
        assert "'cancelled'" in answer.json()["error"]["message"]


async def test_it_is_deleted_at_another_router(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one, max_output_tokens=3000)
        async with client_of(two) as client:
            assert (await client.delete(f"/v1/responses/{name}")).status_code == 200
        while any(replica.num_requests for replica in lab.replicas):
            await asyncio.sleep(0.01)
        for router in (one, two):
            async with client_of(router) as client:
                while (await client.get(f"/v1/responses/{name}")).status_code != 404:
                    await asyncio.sleep(0.01)


async def test_a_repeated_key_joins_the_answer_of_another_router(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        headers = {"idempotency-key": "one"}
        async with client_of(one) as first, client_of(two) as second:
            running = asyncio.create_task(first.post("/v1/chat/completions", json=CHAT, headers=headers))
            while not one.dispatcher.counters.tokens:
                await asyncio.sleep(0.001)
            joined = await second.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert joined.text == (await running).text
            assert sum(router.dispatcher.counters.accepted for router in (one, two)) == 1


@pytest.mark.parametrize("killed", [True, False])
async def test_a_guarded_stream_with_a_key_goes_on_by_itself(tmp_path, killed):
    """The proxy asks another router, which joins the answer that is kept, or goes on with it."""
    async with RouterLab(tmp_path, pace=0.002) as lab:
        headers = {"idempotency-key": "one"}
        text = ""
        async with lab.client.stream(
            "POST", "/v1/chat/completions", json=CHAT, headers=headers, timeout=60
        ) as answer:
            async for part in answer.aiter_text():
                text += part
                if killed and text.count("id: ") > 30:
                    killed = False
                    lab.kill(max(lab.routers, key=lambda one: one.dispatcher.num_live))
        frames = [frame for frame in text.split("\n\n")[:-1] if not frame.startswith(":")]
        assert [frame.split("\n")[0] for frame in frames] == [f"id: {number}" for number in range(len(frames))]
        assert frames[-1].endswith("data: [DONE]")


async def test_a_guarded_background_stream_goes_on_by_itself(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        numbers: list[int] = []
        text = ""
        body = ASKED | {"stream": True}
        async with lab.client.stream("POST", "/v1/responses", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_text():
                text += part
                if not lab.killed and text.count("id: ") > 30:
                    lab.kill(max(lab.routers, key=lambda one: one.dispatcher.num_live))
        for frame in text.split("\n\n")[:-1]:
            if not frame.startswith(":"):
                numbers.append(json.loads(frame.partition("data: ")[2])["sequence_number"])
        assert numbers == list(range(len(numbers)))
        assert '"type":"response.incomplete"' in text


async def test_each_answer_of_a_lost_router_is_taken_over_once(tmp_path):
    async with RouterLab(tmp_path, routers=3, pace=0.005) as lab:
        one, *others = lab.routers
        names = [await begin(one, input=f"number {number}") for number in range(12)]
        await until_tokens(one, names[-1], 5)
        lab.kill(one, successor_after=None)
        for name in names:
            await fetched(others[0], name)
        assert sum(router.dispatcher.counters.accepted for router in others) == len(names)


async def test_one_key_at_two_routers_at_once_is_one_answer(tmp_path, monkeypatch):
    """Both may begin it, each at a second of its own: one keeps it, and both give the same."""
    seconds = count(1_700_000_000.0)
    monkeypatch.setattr("time.time", lambda: next(seconds))
    async with RouterLab(tmp_path, pace=0.002) as lab:
        headers = {"idempotency-key": "one"}
        one, two = lab.routers
        async with client_of(one) as first, client_of(two) as second:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=TEXT, headers=headers) for client in (first, second) * 3)
            )
            later = await second.post("/v1/completions", json=TEXT, headers=headers)
        assert [one.status_code for one in answers] == [200] * 6
        assert len({one.text for one in (*answers, later)}) == 1


async def test_a_router_whose_replicas_are_gone_does_not_say_that_a_response_is(tmp_path):
    async with RouterLab(tmp_path, routers=1) as lab:
        (one,) = lab.routers
        for replica in lab.replicas:
            await replica.close()
        while one.dispatcher.linked:
            await asyncio.sleep(0.001)
        async with client_of(one) as client:
            answer = await client.get("/v1/responses/resp_1")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"


async def test_a_key_is_free_again_after_its_answer_was_deleted(tmp_path):
    async with RouterLab(tmp_path) as lab:
        one, two = lab.routers
        headers = {"idempotency-key": "one"}
        async with client_of(one) as client, client_of(two) as other:
            for _ in range(3):
                body = ASKED | {"background": False, "store": True}
                first = (await client.post("/v1/responses", json=body, headers=headers)).json()
                assert first["status"] == "incomplete"
                assert (await other.delete(f"/v1/responses/{first['id']}")).status_code == 200
                while (await client.get(f"/v1/responses/{first['id']}")).status_code != 404:
                    await asyncio.sleep(0.001)
