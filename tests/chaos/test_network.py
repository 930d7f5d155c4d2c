"""Networks that stop, heal and dawdle between router and replica (FAULTS 18, 20, 21), a tenth as long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import pytest

from cluster.replica.sessions import ReplicaTimes
from cluster.wire import tcp
from cluster.wire.link import ReplicaLink
from cluster.wire.replica_messages import Heartbeat, Report
from cluster.wire.router_messages import Abort, FinishChoice, Submit
from tests.bench.switchboard import PORT, Switchboard, reroute
from tests.chaos.lab import SCALE, NetLab, long_request
from tests.cluster.cluster_lab import FREE_RUN, GatedExecutor, Lab, LabReplica, oracle, until
from tests.simulator.links import FaultPlan

REQUESTS = 16
FEW_STEPS = 15  # in which no request of 20 tokens can end


async def some_are_given_up(lab: Lab, replicas: Sequence[LabReplica]) -> tuple[int, int]:
    """Run requests of which every fourth is given up midway; the others are whole. Returns how many are which."""
    requests = [long_request(f"r{i}", seed=i, tokens=20 + 5 * i) for i in range(REQUESTS)]
    running = [asyncio.create_task(lab.collect(request)) for request in requests]
    await until(lambda: lab.dispatcher.counters.tokens > FEW_STEPS // 2)
    given_up = running[::4]
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)
    for replica in replicas:
        replica.executor.allow(FREE_RUN)
    kept = [index for index in range(REQUESTS) if index % 4]
    results = await asyncio.wait_for(asyncio.gather(*[running[index] for index in kept]), 30)
    assert results == [oracle(requests[index]) for index in kept]
    return len(kept), len(given_up)


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
        replica = await lab.start("a", steps=FEW_STEPS, plan=FaultPlan(repeat=0.5), pace=0.001)
        num_kept, num_given_up = await some_are_given_up(lab, [replica])
        await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
        assert replica.held_blocks == 0
        assert lab.dispatcher.counters.outcomes == {"completed": num_kept, "aborted": num_given_up}


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


@pytest.mark.parametrize("busy", [False, True])
async def test_a_submit_that_is_lost_is_missed_and_runs_once(busy: bool) -> None:
    """Also where nothing follows it on the link, and where reports of others keep the replica from being idle."""
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.02 if busy else 0.0)
        other = asyncio.create_task(lab.collect(long_request("other", tokens=100 if busy else 1)))
        await until(lambda: lab.dispatcher.counters.tokens > 0)
        replica.links[0].drop_next(Submit)
        request = long_request("r", tokens=10)
        assert await asyncio.wait_for(lab.collect(request), 10) == oracle(request)
        if busy:
            assert not other.done(), "the replica was idle for a while"
        await other
        assert lab.lost == []
        assert lab.dispatcher.counters.migrations == 1
        assert replica.core.stats.generated_tokens == 10 + (100 if busy else 1)


async def test_an_abort_that_is_lost_is_said_again() -> None:
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.02)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.tokens > 3)
        replica.links[0].drop_next(Abort)
        running.cancel()
        await asyncio.wait([running])
        assert replica.core.num_requests == 1, "the abort arrived"
        await until(lambda: replica.core.num_requests == 0)
        await replica.until_stats(lambda stats: stats.num_running == 0)
        assert replica.held_blocks == 0
        assert replica.core.stats.generated_tokens < 100


async def test_the_end_of_a_choice_that_is_lost_is_said_again_and_its_siblings_go_on() -> None:
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.02)
        request = long_request("r", seed=1, n=3)
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in lab.dispatcher.generate(request):
            if not seen[0] and chunk.choice == 0:
                replica.links[0].drop_next(FinishChoice)
                lab.dispatcher.finish_choice("r", 0)
            seen[chunk.choice].extend(chunk.token_ids)
        assert {choice: seen[choice] for choice in (1, 2)} == {choice: oracle(request)[choice] for choice in (1, 2)}
        assert replica.core.stats.generated_tokens < 280
        assert lab.dispatcher.counters.migrations == 0


async def test_an_end_that_the_router_never_hears_of_is_missed() -> None:
    """The report with the last token is lost, and no other follows that would show a gap."""
    async with Lab() as lab:
        replica = await lab.start("a", steps=9)
        request = long_request("r", tokens=10)
        running = asyncio.create_task(lab.collect(request))
        await until(lambda: lab.dispatcher.counters.tokens == 9)
        replica.links[0].drop_next(Report)
        await lab.start("b")
        replica.executor.allow(100)
        assert await asyncio.wait_for(running, 10) == oracle(request)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_messages_that_are_lost_on_their_way_up_cost_no_token_and_no_block(seed: int) -> None:
    async with Lab(seed=seed) as lab:
        plan = FaultPlan(drop_up=0.2)
        replicas = [await lab.start(name, steps=FEW_STEPS, plan=plan, pace=0.001) for name in "ab"]
        await some_are_given_up(lab, replicas)
        assert lab.lost == []
        for replica in replicas:
            await until(lambda replica=replica: replica.core.num_requests == 0, deadline=20)
            await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
            assert replica.held_blocks == 0


async def _silence(link: ReplicaLink) -> None:
    """Return once nothing has come for many times as long as a heartbeat takes."""
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.5):
                await link.receive()


async def test_what_the_long_run_cuts_off_hears_nothing_until_it_is_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's own tool: a link goes through the switchboard, is silent while it is cut, and holds afterwards."""
    replica = LabReplica("a", GatedExecutor(64), 64, ReplicaTimes(heartbeat=0.02))
    server = tcp.LinkServer(replica.core.serve)
    address = await server.start()
    with Switchboard() as board:
        monkeypatch.setenv(PORT, str(board.port))
        monkeypatch.setattr(tcp, "connect", tcp.connect)  # put back after the test
        reroute()
        link = await tcp.connect(address, "router")
        assert board.num_doors(os.getpid()) == 1
        assert isinstance(await link.receive(), Heartbeat)
        board.cut(os.getpid())
        await asyncio.wait_for(_silence(link), 5.0)
        board.heal(os.getpid())
        async with asyncio.timeout(5.0):
            assert isinstance(await link.receive(), Heartbeat)
        link.close()
        await server.close()
    replica.executor.close()
    await replica.core.close()
