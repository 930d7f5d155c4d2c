"""Routers, proxies and replicas killed or stopped under 32 requests in every phase, seen as raw bytes.

An answer is whole, or a typed error, or (where the proxy itself died, so that nobody is left to tell) visibly cut:
never a well-formed 200 that is short (FAULTS, kills 3, 11 and 17).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from tests.chaos.raw_http import Exchange, post
from tests.cluster.harness import App, eventually, proxy_processes, replica_processes, router_processes

TOKENS = 150
DEADLINE = 10.0  # seconds from the fault to the error
PROMPT = "def f(x):"
COMPLETION = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
RESPONSE = {"model": "demo", "input": PROMPT, "max_output_tokens": TOKENS, "ignore_eos": True}
# Streams that run when the fault comes, answers that are being made, and streams that are only just asked for.
RUNNING = [
    *[("/v1/completions", COMPLETION | {"stream": True})] * 14,
    *[("/v1/responses", RESPONSE | {"stream": True})] * 6,
]
UNARY = [("/v1/completions", COMPLETION)] * 6
ASKED = [("/v1/completions", COMPLETION | {"stream": True})] * 6


async def exchanges(port: int, strike: Callable[[], None]) -> tuple[list[Exchange], float]:
    """Run all requests, `strike()` in the middle of them; return what came of them and when it struck."""
    running = asyncio.Semaphore(0)

    async def begun(path: str, asked: dict) -> Exchange:
        events = 0

        def on_data() -> None:
            nonlocal events
            events += 1
            if events == 3:  # the head and a few frames
                running.release()

        return await post(port, path, asked, on_data)

    tasks = [asyncio.create_task(begun(path, asked)) for path, asked in RUNNING]
    tasks += [asyncio.create_task(post(port, path, asked)) for path, asked in UNARY]
    async with asyncio.timeout(30):
        for _ in RUNNING:
            await running.acquire()
    tasks += [asyncio.create_task(post(port, path, asked)) for path, asked in ASKED]
    await asyncio.sleep(0.02)  # those are on their way, somewhere
    strike()
    struck = time.monotonic()
    return await asyncio.gather(*tasks), struck


def outcome(path: str, asked: dict, got: Exchange) -> str:
    """What this is for a client: `whole`, an error's code, `cut` or `hung`; anything else must never be."""
    if got.ended is None:
        return "hung"
    if not got.framed:
        return "cut"
    if got.error is not None:
        return str(got.error["code"])
    if got.status != 200:
        return f"untyped {got.status}: {got.body[-300:]!r}"
    return "whole" if tokens_of(path, asked, got.body) == TOKENS else f"SILENTLY SHORT: {got.body[-300:]!r}"


def tokens_of(path: str, asked: dict, body: bytes) -> int:
    """Tokens of an answer that says that it is complete; -1 where it does not."""
    if not asked.get("stream"):
        return len(json.loads(body)["choices"][0]["token_ids"])
    if path == "/v1/responses":
        last = json.loads(body.rstrip().rpartition(b"data: ")[2])
        return last["response"]["usage"]["output_tokens"] if last["type"] == "response.incomplete" else -1
    *frames, done = [frame.removeprefix(b"data: ") for frame in body.split(b"\n\n")[:-1]]
    choices = [json.loads(frame)["choices"][0] for frame in frames]
    if done != b"[DONE]" or choices[-1]["finish_reason"] != "length":
        return -1
    return sum(len(choice.get("token_ids", ())) for choice in choices)


@pytest.mark.parametrize(
    ("victims", "sign", "allowed"),
    [
        (router_processes, signal.SIGKILL, {"router_lost"}),
        (router_processes, signal.SIGSTOP, {"router_lost"}),
        (proxy_processes, signal.SIGKILL, {"cut"}),
        (proxy_processes, signal.SIGSTOP, {"cut"}),
        (replica_processes, signal.SIGKILL, set()),
    ],
    ids=["router-killed", "router-stopped", "proxy-killed", "proxy-stopped", "replica-killed"],
)
async def test_no_answer_is_silently_short(
    demo_app: App, victims: Callable[[], list[psutil.Process]], sign: signal.Signals, allowed: set[str]
) -> None:
    def strike() -> None:
        os.kill(victims()[0].pid, sign)

    got, struck = await exchanges(demo_app.port, strike)
    asked = RUNNING + UNARY + ASKED
    outcomes = Counter(outcome(path, body, one) for (path, body), one in zip(asked, got, strict=True))
    assert set(outcomes) <= allowed | {"whole"}, outcomes
    assert outcomes["whole"] < len(asked) or not allowed, "all were done before it struck"
    late = [one for one in got if (not one.framed or one.error is not None) and one.ended - struck > DEADLINE]
    assert not late, f"{len(late)} errors came after {DEADLINE} s"
    assert all(one.error["retryable"] and one.error["request_id"] for one in got if one.error)
    demo_app.wait_whole()
    eventually(lambda: demo_app.metric("squadron_num_requests_running") == 0, "what the victim ran is aborted")
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free")
