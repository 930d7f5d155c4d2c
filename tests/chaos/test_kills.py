"""kill -9 under load: every stream ends whole, with the tokens of an undisturbed run (FAULTS, kills 1 to 3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import jsonschema
import openai
import psutil
import pytest

from tests.chaos.strike import Strike
from tests.e2e.harness import App, eventually, gone, kill, replica_processes, worker_processes

STREAMS = 16
TOKENS = 120
SCHEMA = {
    "type": "array",
    "minItems": 14,
    "maxItems": 14,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}


def arguments(index: int) -> dict:
    """Half greedy, half seeded, prompts of different lengths."""
    sampling = {"temperature": 0} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
    prompt = f"def function_{index}(self, value):\n    " + "x = value + 1\n    " * (index % 4)
    extra = {"ignore_eos": True}
    return {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "extra_body": extra, **sampling}


def structured(index: int) -> dict:
    """As `arguments`, and the output must be JSON of a schema that takes all of it."""
    extra = {"structured_outputs": {"json": SCHEMA}}
    return arguments(index) | {"max_tokens": 800, "extra_body": extra}


async def stream_all(
    app: App, on_chunk: Callable[[], None] = lambda: None, asked: Callable[[int], dict] = arguments
) -> list[tuple[str, str | None]]:
    """Run all streams at once; `on_chunk` hears of each chunk of all of them."""

    async def one(client: openai.AsyncOpenAI, index: int) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await client.completions.create(stream=True, **asked(index)):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
            on_chunk()
        return text, reason

    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        return await asyncio.gather(*(one(client, index) for index in range(STREAMS)))


@pytest.mark.parametrize(
    ("victims", "asked"),
    [(replica_processes, arguments), (worker_processes, arguments), (replica_processes, structured)],
    ids=["replica", "worker-rank", "replica-structured"],
)
async def test_every_stream_survives_a_kill_token_exact(
    demo_app: App, victims: Callable[[], list[psutil.Process]], asked: Callable[[int], dict]
) -> None:
    undisturbed = await stream_all(demo_app, asked=asked)
    if asked is structured:
        for text, _ in undisturbed:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert {reason for _, reason in undisturbed} == {"stop" if asked is structured else "length"}
    before = demo_app.metric("squadron_migrations_total")
    victim = victims()[0]
    strike = Strike(20 * STREAMS, lambda: kill(victim))
    disturbed = await stream_all(demo_app, strike, asked)
    assert strike.at, "the streams ended before the kill"
    assert disturbed == undisturbed
    assert demo_app.metric("squadron_migrations_total") > before, "no stream had to move: the kill missed them"
    demo_app.wait_whole()
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free")
    assert gone(victim.pid)
