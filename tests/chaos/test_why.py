"""What a killed rank leaves behind: `squadron why` tells of the move, and a flight record lies by the logs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
import ray

from cluster.replica.host import PREFIX
from deploy.cli.why import FOUND, show_why
from tests.chaos.strike import Strike
from tests.e2e.harness import App, kill, worker_processes

STREAMS = 8


async def ids_of_streams(app: App, strike: Strike) -> list[str]:
    """Run streams to their ends; returns the ids that their answers bear."""

    async def one(client: openai.AsyncOpenAI) -> str:
        name = ""
        extra = {"ignore_eos": True}
        stream = await client.completions.create(
            model="demo", prompt="import os", stream=True, max_tokens=120, extra_body=extra
        )
        async for chunk in stream:
            name = chunk.id
            strike(chunk)
        return name

    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        return await asyncio.gather(*(one(client) for _ in range(STREAMS)))


async def test_the_death_of_a_rank_is_told_of_and_dumped(demo_app: App, capsys: pytest.CaptureFixture[str]) -> None:
    victim = worker_processes()[0]
    (replica,) = [one["id"] for one in demo_app.ready()["replicas"] if victim.pid in one["pids"]]
    strike = Strike(20 * STREAMS, lambda: kill(victim))
    names = await ids_of_streams(demo_app, strike)
    assert strike.at, "the streams ended before the kill"
    demo_app.wait_whole()

    assert [show_why(demo_app.url, None, name, as_json=True) for name in names].count(FOUND) >= 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    stories = [[event["what"] for event in body["events"]] for body in told if "events" in body]
    assert any(story[:2] == ["migration", "sent"] and story[-1] == "done" for story in stories), stories

    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    (dump,) = logs.glob(f"{PREFIX}{replica}-*.json")
    body = json.loads(dump.read_text())
    assert (body["replica"], "rank 1" in body["reason"]) == (replica, True), body["reason"]
