"""An answer that is made for its client alone is ended some time after the last one has left."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cluster.responses import shelf, store
from tests.cluster.ingress.router_lab import RouterLab
from tests.cluster.responses.test_router_deaths import CHAT as LONG
from tests.cluster.responses.test_router_deaths import client_of
from tests.openai_app import MODEL, app_for, saying, served_model, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
REPLY = {"model": MODEL, "input": "hi", "stream": True}
KEY = {"idempotency-key": "one"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(shelf, "GRACE", 0.05)
    monkeypatch.setattr(store, "SWEEP", 0.01)


async def leave(client, source, path, body):
    """Ask, and leave before the first token."""
    asking = asyncio.create_task(client.post(path, json=body, headers=KEY))
    while not source.requests:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", REPLY)])
@pytest.mark.parametrize("hold", [0, 3])
async def test_it_is_ended_and_the_next_request_with_its_key_gets_it(model, soon, path, body, hold):
    source = saying(model, "hello world", hold=hold)
    async with serving(app_for(source, model)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await leave(client, source, path, body)
        while not source.closed:
            await asyncio.sleep(0.001)
        source.go.set()
        again = (await client.post(path, json=body, headers=KEY)).text
    assert again.endswith("[DONE]\n\n") or '"type":"response.completed"' in again
    assert len(source.requests) == 2


@pytest.mark.parametrize("asked", [{"background": True}, {"store": True}])
async def test_one_that_is_to_stay_is_made_to_its_end(model, soon, asked):
    source = saying(model, "hello world", hold=0)
    async with serving(app_for(source, model)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await leave(client, source, "/v1/responses", REPLY | asked)
        await asyncio.sleep(0.2)
        assert not source.closed
        source.go.set()
        await client.post("/v1/responses", json=REPLY | asked, headers=KEY)
    assert len(source.requests) == 1


async def test_who_comes_back_in_time_finds_it_running(model):
    source = saying(model, "hello world", hold=3)
    async with serving(app_for(source, model)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await leave(client, source, "/v1/chat/completions", CHAT)
        again = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=KEY))
        source.go.set()
        assert (await again).text.endswith("[DONE]\n\n")
    assert len(source.requests) == 1


async def test_a_reader_at_another_router_keeps_it_running(tmp_path, soon, monkeypatch):
    monkeypatch.setattr(shelf, "GRACE", 1.0)
    async with RouterLab(tmp_path, pace=0.005) as lab:
        one, two = lab.routers
        body = LONG | {"max_tokens": 500}
        async with client_of(one) as first, client_of(two) as second:
            asking = asyncio.create_task(first.post("/v1/chat/completions", json=body, headers=KEY))
            while not one.dispatcher.counters.tokens:
                await asyncio.sleep(0.001)
            joined = asyncio.create_task(second.post("/v1/chat/completions", json=body, headers=KEY))
            while "squadron_answer_replays_running" not in (await second.get("/metrics")).text:
                await asyncio.sleep(0.001)
            asking.cancel()
            text = (await joined).text
        assert text.endswith("[DONE]\n\n")
        assert '"error"' not in text
        assert sum(router.dispatcher.counters.accepted for router in (one, two)) == 1
