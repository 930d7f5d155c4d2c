"""Replicas come and go with the load, from one to two and back, to none and back, and no stream is harmed."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest
from ray import serve

from tests.e2e.harness import App, deploy, eventually, kill, processes, router_processes

NAME = "scaled"
LIMITS = {"max_num_seqs": 4, "num_kv_blocks": 256, "cpus_per_worker": 0.5}
SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "max_queue_wait": 120.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "downscale_to_zero_delay_s": 4.0,
    "cold_start_timeout": 90.0,
    "drain_timeout": 20.0,
}


@pytest.fixture(scope="module")
def app(serve_port: int):
    yield deploy(serve_port, NAME, model="demo", replicas=1, **LIMITS, **SCALING)
    serve.delete(NAME)


def asked(index: int, tokens: int) -> dict:
    prompt = f"def function_{index}(self, value):\n    "
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }


def replicas(app: App) -> int:
    return len(app.ready().get("replicas", []))


async def texts(app: App, tokens: int, indices: range) -> list[tuple[str, str | None]]:
    """Stream these requests at once and return text and finish reason of each."""

    async def one(client: openai.AsyncOpenAI, index: int) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await client.completions.create(stream=True, **asked(index, tokens)):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*(one(client, index) for index in indices))


async def test_from_one_to_two_and_back_with_streams_unharmed(app: App) -> None:
    """Load until there are two, then a trickle: the streams that run while one goes are whole and the same."""
    alone = await texts(app, 60, range(2))
    deadline = time.monotonic() + 90
    while await asyncio.to_thread(replicas, app) < 2:
        assert time.monotonic() < deadline, "no second replica came"
        assert {reason for _, reason in await texts(app, 100, range(12))} == {"length"}
    while await asyncio.to_thread(replicas, app) > 1:
        assert time.monotonic() < deadline + 60, "the second replica stayed"
        assert await texts(app, 60, range(2)) == alone


def test_to_none_and_back_by_a_request_that_waits(app: App) -> None:
    """The router that wakes the replica is the one that saw the last one go."""
    eventually(lambda: replicas(app) == 0 and app.ready()["cold"], "no replica while nobody asks", 60)
    router = app.ready()["router"]
    answer = httpx.post(f"{app.url}/v1/completions", json=_json(asked(0, 20)), timeout=100)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 20
    body = eventually(lambda: not (body := app.ready())["cold"] and body, "one replica is there again", 20)
    assert (body["router"], len(body["replicas"])) == (router, 1)


def test_to_none_and_back_by_a_request_that_waits_for_a_router_that_came_anew(app: App) -> None:
    """The router dies while there is no replica: the next one wakes nobody, until somebody asks."""
    eventually(lambda: replicas(app) == 0 and app.ready()["cold"], "no replica while nobody asks", 60)
    eventually(lambda: not processes(f"ray::ServeReplica:{NAME}:Replica"), "the last replica is gone", 20)
    body = app.ready()
    assert (body["ready"], body["models"], body["replicas"]) == (True, {"demo": True}, [])
    kill(router_processes(NAME)[0])
    eventually(lambda: app.ready()["router"] != body["router"], "another router", 60)
    # Longer than a replica takes to start, and than Serve remembers demand: nothing of our own may look like some.
    for _ in range(80):
        assert not processes(f"ray::ServeReplica:{NAME}:Replica"), "a replica was woken although nobody asks"
        time.sleep(0.1)
    body = app.ready()
    assert (body["ready"], body["cold"], body["replicas"]) == (True, ["demo"], [])
    began = time.monotonic()
    answer = httpx.post(f"{app.url}/v1/completions", json=_json(asked(0, 20)), timeout=100)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert time.monotonic() - began < 60
    eventually(lambda: replicas(app) == 1 and not app.ready()["cold"], "one replica is there again", 20)


def _json(request: dict) -> dict:
    return {key: value for key, value in request.items() if key != "extra_body"} | request["extra_body"]
