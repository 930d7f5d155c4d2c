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

from tests.chaos.streams import WHOLE, client_of, greedy_or_seeded, read_all
from tests.cluster.command import Command, url_of
from tests.cluster.harness import eventually

STREAMS = 8
ORPHAN_SECONDS = 20.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Command]:
    """The demo model on a port of its own choosing, in a process group of its own."""
    command = Command(
        *("serve", "demo", "--port", "0", "--device", "cpu", "--dtype", "float32"),
        *("--kv-cache-memory-bytes", str(64 * 2**20)),
        home=tmp_path,
    )
    try:
        command.wait_for("Ctrl-C stops it")
        yield command
    finally:
        command.kill()


async def test_sigterm_lets_streams_finish_and_admits_nothing_new(served: Command) -> None:
    asked = [greedy_or_seeded(index, 400) for index in range(STREAMS)]
    async with client_of(url_of(served)) as client:
        undisturbed = await read_all(client, asked)
        heard = 0

        def stop(_) -> None:
            nonlocal heard
            heard += 1
            if heard == 10 * STREAMS:
                os.kill(served.process.pid, signal.SIGTERM)

        streams = await read_all(client, asked, stop)
        with pytest.raises(httpx.HTTPError):
            (await client.post("/v1/completions", json=asked[0], timeout=30)).raise_for_status()
    assert [stream.said for stream in streams] == [stream.said for stream in undisturbed]
    assert {stream.kind for stream in streams} == {WHOLE}
    assert await asyncio.to_thread(served.wait) == 0


def test_nothing_outlives_a_killed_serve_process(served: Command) -> None:
    """Ray's processes, replicas and helpers are nobody's then: they end by themselves."""
    body = {"model": "demo", "prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["a", "b"]}}
    assert httpx.post(f"{url_of(served)}/v1/completions", json=body, timeout=60).status_code == 200
    started = served.descendants()
    titles = " ".join(" ".join(process.cmdline()) for process in started)
    assert "Replica" in titles
    os.kill(served.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: not any(map(runs, started)), "all processes have ended", ORPHAN_SECONDS)
    print(f"all ended within {time.monotonic() - killed:.1f} s")


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
