"""Kills at other times than in decode: in prefill, in loading, of all replicas at once, of Serve's controller.

FAULTS 2, 9, 12 and 15, on the app of the other cluster tests, each time with every invariant on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.invariants import Invariants
from tests.chaos.streams import ERROR, Stream, check_exact, client_of, greedy_or_seeded, read_all, read_stream
from tests.chaos.strike import Strike
from tests.e2e.harness import App, eventually, gone, kill, processes, replica_processes, worker_processes

STREAMS = 16
pytestmark = pytest.mark.timeout(300)  # replicas are started anew, on a machine that others may use as well
TOKENS = 120
LONG = "import os, re, json, ast, abc, cmd, csv, dis\n" * 40


def requests(tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [greedy_or_seeded(index, tokens) for index in range(STREAMS)]


def long_prompts(salt: str) -> list[dict[str, Any]]:
    """Requests whose prompts take many steps to compute. A new salt keeps them out of every prefix cache."""
    return [{**one, "prompt": f"# {i}\n{LONG}", "cache_salt": salt} for i, one in enumerate(requests(40))]


async def sooner_or_later(check: Callable[[], Any], what: str) -> Any:
    """`eventually`, beside the streams that are read meanwhile."""
    return await asyncio.to_thread(eventually, check, what)


async def test_a_kill_in_prefill_and_another_while_weights_load_cost_no_token(demo_app: App) -> None:
    async with client_of(demo_app.url) as client, Invariants(demo_app.url):
        oracle = await read_all(client, long_prompts("undisturbed"))
        before = {process.pid for process in replica_processes()}
        rank = worker_processes()[0]
        rank.suspend()  # so that its replica is still in prefill when the kill comes
        running = asyncio.create_task(read_all(client, long_prompts("disturbed")))
        await sooner_or_later(lambda: demo_app.metric("squadron_requests_live") == STREAMS, "all are taken in")
        kill(rank)
        newcomers = await sooner_or_later(lambda: [p for p in replica_processes() if p.pid not in before], "a start")
        kill(newcomers[0])
        check_exact(await running, oracle)
        await asyncio.to_thread(demo_app.wait_whole, 150)


@asynccontextmanager
async def newcomers_held_up(before: set[int]) -> AsyncIterator[None]:
    """Stop each replica that starts while entered; `before`: process ids of the others. They go on afterwards."""
    held: dict[int, psutil.Process] = {}

    async def hold() -> None:
        while True:
            for one in replica_processes():
                if one.pid not in before and one.pid not in held:
                    held[one.pid] = one
                    one.suspend()
            await asyncio.sleep(0.02)

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        for one in held.values():
            one.resume()


async def test_the_death_of_all_replicas_is_told_within_a_second_and_running_streams_wait_for_the_next(
    demo_app: App,
) -> None:
    async with client_of(demo_app.url) as client, Invariants(demo_app.url):
        oracle = await read_all(client, requests())

        def kill_all() -> None:
            for process in replica_processes():
                kill(process)

        # Others come within that second, on a machine that has little else to do.
        async with newcomers_held_up({process.pid for process in replica_processes()}):
            running = asyncio.create_task(read_all(client, requests(), Strike(20 * STREAMS, kill_all)))
            await sooner_or_later(lambda: not demo_app.ready()["ready"], "nobody is ready")
            began = time.monotonic()
            refused = await read_stream(client, greedy_or_seeded(0))
            waited = time.monotonic() - began
        assert (refused.kind, refused.status) == (ERROR, 503), refused
        assert refused.error is not None
        assert refused.error["retryable"] is True
        assert int(refused.retry_after or 0) >= 1
        assert waited < 3.0, f"refused after {waited:.1f} s"  # 1 s and what a busy machine adds
        check_exact(await running, oracle)
        await asyncio.to_thread(demo_app.wait_whole, 150)
        check_exact([await read_stream(client, oracle[0].asked)], oracle[:1])


async def test_without_serves_controller_requests_are_served_and_the_next_one_takes_over(demo_app: App) -> None:
    async with client_of(demo_app.url) as client, Invariants(demo_app.url):
        oracle = await read_all(client, requests())
        (controller,) = processes("ray::ServeController")
        strike = Strike(20 * STREAMS, lambda: kill(controller))
        running = asyncio.create_task(read_all(client, requests(), strike))
        await sooner_or_later(lambda: strike.at and gone(controller.pid), "the end of the controller")
        meanwhile = await ask_while_there_is_no(client, "ray::ServeController")
        check_exact(await running, oracle)
        check_exact(meanwhile, [await read_stream(client, meanwhile[0].asked)] * len(meanwhile))
        # The next one knows what it has to look after: a replica that is killed now comes back.
        (successor,) = await sooner_or_later(lambda: processes("ray::ServeController"), "another controller")
        assert successor.pid != controller.pid
        victim = replica_processes()[0]
        strike = Strike(20 * STREAMS, lambda: kill(victim))
        check_exact(await read_all(client, requests(), strike), oracle)
        assert gone(victim.pid)
        await asyncio.to_thread(demo_app.wait_whole, 150)
    assert httpx.get(f"{demo_app.url}/ready", timeout=10).status_code == 200


async def ask_while_there_is_no(client: httpx.AsyncClient, title: str) -> list[Stream]:
    """Ask one thing after the other; return what was asked and answered before a process of that title was there."""
    answered: list[Stream] = []
    while True:
        stream = await read_stream(client, greedy_or_seeded(0, 4))
        if processes(title):
            assert answered, "the next one was there too soon: nothing was answered meanwhile"
            return answered
        answered.append(stream)
