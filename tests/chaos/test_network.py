"""Networks that stop, heal and dawdle between router and replica (FAULTS 18, 20, 21), a tenth as long."""

from __future__ import annotations

import asyncio

import pytest

from cluster.links.faulty import FaultPlan
from tests.chaos.lab import SCALE, NetLab, long_request
from tests.unit.cluster_lab import Lab, oracle, until

REQUESTS = 16


# In service a router waits 3 s, a replica 10 s.
@pytest.mark.parametrize(("seconds", "migrates"), [(2, False), (10, True), (60, True)])
async def test_a_partition_costs_no_token_and_doubles_none_after_it_heals(seconds: float, migrates: bool) -> None:
    async with NetLab() as lab:
        cut_off = await lab.start_remote("cut off", pace=0.005)
        other = await lab.start_remote("other", pace=0.005)
        requests = [long_request(f"r{i}", seed=i) for i in range(REQUESTS)]
        running = [asyncio.create_task(lab.collect(request)) for request in requests]
        await until(lambda: lab.dispatcher.counters.tokens > 10 * REQUESTS)
        assert cut_off.core.num_requests, "nothing runs where the partition will be"
        lab.proxies["cut off"].partition()
        await asyncio.sleep(seconds * SCALE)
        lab.proxies["cut off"].heal()
        assert await asyncio.gather(*running) == [oracle(request) for request in requests]
        assert (lab.dispatcher.counters.migrations > 0) == migrates
        assert [code for _, code in lab.lost] == (["stalled"] if migrates else [])
        await until(lambda: len([view for view in lab.dispatcher.replicas() if view.ready]) == 2)
        await lab.quiet(cut_off, other)


async def test_a_replica_that_nobody_reaches_frees_what_it_ran_by_itself() -> None:
    """Its router went on elsewhere; a partition that never heals must not hold blocks for ever."""
    async with NetLab() as lab:
        lonely = await lab.start_remote("lonely", pace=0.02)
        request = long_request("r")
        running = asyncio.create_task(lab.collect(request))
        await until(lambda: lonely.held_blocks > 0 and lab.dispatcher.counters.tokens > 5)
        lab.proxies["lonely"].partition()
        await lab.start_remote("other")
        assert await running == oracle(request)
        await lab.quiet(lonely)


async def test_a_delay_of_200_ms_kills_nobody() -> None:
    async with NetLab() as lab:
        replicas = [await lab.start_remote(name, delay=0.2) for name in "ab"]
        requests = [long_request(f"r{i}", seed=i) for i in range(REQUESTS)]
        for _ in range(3):
            lines = [lab.collect(request) for request in requests]
            assert await asyncio.gather(*lines) == [oracle(request) for request in requests]
        assert lab.lost == []
        assert lab.dispatcher.counters.migrations == 0
        await lab.quiet(*replicas)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_submits_and_aborts_that_arrive_twice_run_and_end_once(seed: int) -> None:
    async with Lab(seed=seed) as lab:
        replica = await lab.start("a", plan=FaultPlan(repeat=0.5), pace=0.001)
        requests = [long_request(f"r{i}", seed=i, tokens=20 + 5 * i) for i in range(REQUESTS)]
        running = [asyncio.create_task(lab.collect(request)) for request in requests]
        await until(lambda: lab.dispatcher.counters.tokens > 3 * REQUESTS)
        given_up = running[::4]
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        kept = [index for index in range(REQUESTS) if index % 4]
        assert [await running[index] for index in kept] == [oracle(requests[index]) for index in kept]
        await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
        assert replica.held_blocks == 0
        assert lab.dispatcher.counters.outcomes == {"completed": len(kept), "aborted": len(given_up)}


async def test_an_abort_that_is_lost_with_its_link_frees_the_request_with_the_link() -> None:
    async with NetLab() as lab:
        replica = await lab.start_remote("a", pace=0.005)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.tokens > 5)
        lab.proxies["a"].partition()
        running.cancel()
        await asyncio.wait([running])
        assert replica.core.num_requests == 1, "the abort arrived: the partition came too late"
        await lab.quiet(replica)
        lab.proxies["a"].heal()
        again = long_request("again")
        assert await lab.collect(again) == oracle(again)
