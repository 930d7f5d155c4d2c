"""Processes that are stopped, not dead, and a router that dies without a word (FAULTS, kills 4, 5 and 17)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from ray import serve

from tests.chaos.strike import Strike
from tests.chaos.test_kills import stream_all
from tests.e2e.harness import App, deploy, eventually, gone, kill, router_processes

NAME = "hangs"
CHUNKS = 200  # over all streams, before a process is stopped
DRAIN = 30.0  # seconds that Serve would wait for a lease which nobody gives back


@pytest.fixture(scope="module")
def lone_app(serve_port: int) -> Iterator[App]:
    """One replica, a tensor-parallel group of two with a short step deadline, in an app of its own."""
    yield deploy(
        serve_port,
        NAME,
        model="demo",
        dtype="float32",
        tensor_parallel_size=2,
        cpus_per_worker=0.5,
        step_timeout=3,
        drain_timeout=DRAIN,
    )
    serve.delete(NAME)


def pids(app: App) -> list[int]:
    """Process ids of the replica's ranks, none while there is no replica."""
    replicas = app.ready()["replicas"]
    return replicas[0]["pids"] if replicas else []


async def test_a_stopped_rank_ends_its_group_and_every_stream_goes_on(lone_app: App) -> None:
    undisturbed = await stream_all(lone_app)
    driver, worker = pids(lone_app)

    stop = Strike(CHUNKS, lambda: os.kill(worker, signal.SIGSTOP))
    assert await stream_all(lone_app, stop) == undisturbed
    assert stop.at, "the streams ended before the process was stopped"
    assert gone(driver)
    assert gone(worker)
    lone_app.wait_whole()


async def test_a_rank_that_stops_for_a_second_is_not_replaced(lone_app: App) -> None:
    undisturbed = await stream_all(lone_app)
    ranks = pids(lone_app)
    worker = psutil.Process(ranks[1])

    def pause() -> None:
        worker.suspend()
        asyncio.get_running_loop().call_later(1.0, worker.resume)

    strike = Strike(CHUNKS, pause)
    assert await stream_all(lone_app, strike) == undisturbed
    assert strike.at, "the streams ended before the process was stopped"
    assert pids(lone_app) == ranks, "a pause was taken for a death"


async def test_a_stopped_driver_is_replaced_in_time_for_its_streams(lone_app: App) -> None:
    """Nobody in the process is left to notice: its router leaves it, and Serve puts another in its place."""
    undisturbed = await stream_all(lone_app)
    ranks = pids(lone_app)
    stop = Strike(CHUNKS, lambda: os.kill(ranks[0], signal.SIGSTOP))
    assert await stream_all(lone_app, stop) == undisturbed
    assert stop.at, "the streams ended before the process was stopped"
    eventually(lambda: all(gone(pid) for pid in ranks), "the stopped process has been killed", timeout=DRAIN - 10)
    lone_app.wait_whole()


def test_a_router_that_was_killed_holds_no_replica_back_from_stopping(lone_app: App) -> None:
    ranks, router = pids(lone_app), lone_app.ready()["router"]
    kill(router_processes(NAME)[0])
    eventually(lambda: lone_app.ready().get("router", router) != router, "another router")
    lone_app.wait_whole()
    assert pids(lone_app) == ranks, "the replica was replaced: this says nothing of leases"
    serve.delete(NAME, _blocking=False)
    eventually(lambda: all(gone(pid) for pid in ranks), "the replica has stopped", timeout=DRAIN - 10)
