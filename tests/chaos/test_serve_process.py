"""The `squadron serve` process itself: told to stop under load, and killed without a word (FAULTS, kills 16)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.streams import WHOLE, check_exact, check_promise, client_of, greedy_or_seeded, read_all, read_stream
from tests.chaos.strike import Strike
from tests.e2e.command import Command, url_of
from tests.e2e.harness import answers, eventually, gone

STREAMS = 4
TOKENS = 1200  # so that they run for longer than it takes to close the door
REFUSED_SECONDS = 5.0
ORPHAN_SECONDS = 20.0
REPLICA = "ServeReplica:squadron:Replica"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Command]]:
    """Two that serve the demo model, started side by side: two tests end one each."""
    arguments = ("serve", "demo", "--port", "0", "--device", "cpu", "--dtype", "float32")
    memory = ("--kv-cache-memory-bytes", str(64 * 2**20))
    commands = [Command(*arguments, *memory, home=tmp_path_factory.mktemp("home")) for _ in range(2)]
    try:
        for command in commands:
            command.wait_for("Ctrl-C stops it")
        yield list(commands)
    finally:
        for command in commands:
            command.kill()


def running(served: Command, what: str) -> list[psutil.Process]:
    """Return the processes that it has started with `what` in their command lines, zombies not among them."""
    commands = answers(served.descendants(), psutil.Process.cmdline)
    return [process for process, words in commands if what in " ".join(words)]


@pytest.fixture
def served(started: list[Command]) -> Command:
    """One that no test has ended."""
    return started.pop()


async def test_without_its_fork_server_replicas_are_started_by_ray(started: list[Command]) -> None:
    """And what it had forked serves on."""
    served = started[-1]
    (forks,), (replica,) = running(served, "deploy.serve.forked_workers"), running(served, REPLICA)
    assert replica.ppid() == forks.pid
    async with client_of(url_of(served)) as client:
        undisturbed = await read_stream(client, greedy_or_seeded(0, 64))
        forks.kill()
        check_exact([await read_stream(client, greedy_or_seeded(0, 64))], [undisturbed])
        assert replica.is_running()
        replica.kill()
        check_exact([await read_stream(client, greedy_or_seeded(0, 64))], [undisturbed])
    (successor,) = running(served, REPLICA)
    assert successor.ppid() != forks.pid


async def test_sigterm_lets_streams_finish_and_admits_nothing_new(served: Command) -> None:
    asked = [greedy_or_seeded(index, TOKENS) for index in range(STREAMS)]
    async with client_of(url_of(served)) as client:
        undisturbed = await read_all(client, asked)
        stop = Strike(10 * STREAMS, lambda: os.kill(served.process.pid, signal.SIGTERM))
        running = asyncio.create_task(read_all(client, asked, stop))
        while stop.at is None:
            await asyncio.sleep(0.01)
        while (late := await read_stream(client, greedy_or_seeded(0, 1))).kind == WHOLE:
            assert time.monotonic() < stop.at + REFUSED_SECONDS, "requests are still let in"
        told = [late, *await read_all(client, [greedy_or_seeded(0, 1)] * 4)]
        assert not running.done(), "the streams had ended: this shows nothing"
        streams = await running
    print([(one.kind, one.status, one.error) for one in told])
    assert WHOLE not in {one.kind for one in told}
    assert [(one.kind, len(one.tokens), one.error) for one in streams] == [(WHOLE, TOKENS, None)] * STREAMS
    check_promise(streams, undisturbed)
    assert await asyncio.to_thread(served.wait) == 0


def test_nothing_outlives_a_killed_serve_process(served: Command) -> None:
    """Ray's processes, replicas and helpers are nobody's then: they end by themselves."""
    body = {"model": "demo", "prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["a", "b"]}}
    assert httpx.post(f"{url_of(served)}/v1/completions", json=body, timeout=60).status_code == 200
    started = served.descendants()
    forks = Path(running(served, "deploy.serve.forked_workers")[0].cmdline()[-2])
    assert forks.is_socket()
    assert any("Replica" in " ".join(words) for _, words in answers(started, psutil.Process.cmdline))
    os.kill(served.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: all(gone(process.pid) for process in started), "all processes have ended", ORPHAN_SECONDS)
    print(f"all ended within {time.monotonic() - killed:.1f} s")
    assert not forks.parent.exists(), "the fork server's folder is left"
