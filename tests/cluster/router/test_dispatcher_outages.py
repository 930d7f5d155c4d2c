"""What a router does when it loses replicas in numbers, with default settings: it blames and forgets nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest

from tests.cluster.router.outage_lab import MODEL, OutageLab, asked
from tests.simulator.virtual_time import run_virtually


@pytest.mark.parametrize(("replicas", "seconds"), [(4, 5.0), (8, 5.0), (16, 5.0), (4, 2.0), (4, 12.0)])
def test_a_cut_between_a_router_and_all_replicas_loses_no_stream(replicas, seconds):
    """In the middle of long prompts: everybody is silent, nobody has died. Who comes meanwhile waits."""

    async def main():
        async with OutageLab([f"replica-{i:02}" for i in range(replicas)]) as lab:
            running = lab.ask(asked(i, 20_000, 40) for i in range(6 * replicas))
            await asyncio.sleep(2.0)
            lab.cut()
            for i in range(replicas):
                await asyncio.sleep(seconds / replicas)
                running += lab.ask([asked(1000 + i, 1_000, 40)])
                assert lab.dispatcher.room() is not None, "the admission queue would send those away who come"
            lab.heal()
            assert Counter(await asyncio.gather(*running)) == {"whole": 7 * replicas}
            assert lab.dispatcher.counters.migrations <= 7 * replicas, "from one silent replica to the next"

    run_virtually(main())


def test_prompts_that_wait_are_not_blamed_for_kills():
    """Both replicas are killed within one prefill; sixty prompts wait, and the two that come run them at once."""

    async def main():
        async with OutageLab(["a", "b"]) as lab:
            running = lab.ask(asked(i, 30_000, 8) for i in range(60))
            await asyncio.sleep(0.5)
            lab.kill("a")
            await asyncio.sleep(0.5)
            lab.kill("b")
            await asyncio.sleep(2.0)
            await lab.start("c")
            await asyncio.sleep(1.0)
            await lab.start("d")
            assert Counter(await asyncio.gather(*running)) == {"whole": 60}

    run_virtually(main())


def test_those_that_come_back_one_after_the_other_share_what_waits():
    """All of four die; whoever is there first is not given what the others could run half a second later."""

    async def main():
        async with OutageLab("abcd") as lab:
            running = lab.ask(asked(i, 200, 600) for i in range(200))
            await asyncio.sleep(1.0)
            for name in "abcd":
                lab.kill(name)
            for name in "efgh":
                await asyncio.sleep(0.5)
                await lab.start(name)
            await asyncio.sleep(0.5)
            assert sum(lab.running().values()) == 200
            assert all(45 <= count <= 55 for count in lab.running().values()), lab.running()
            assert Counter(await asyncio.gather(*running)) == {"whole": 200}

    run_virtually(main())


def test_what_waits_is_not_kept_for_those_that_do_not_come():
    """Three of four stay away: the one that came has everything soon after."""

    async def main():
        async with OutageLab("abcd") as lab:
            running = lab.ask(asked(i, 200, 600) for i in range(40))
            await asyncio.sleep(1.0)
            for name in "abcd":
                lab.kill(name)
            await asyncio.sleep(0.5)
            await lab.start("e")
            await asyncio.sleep(3.0)
            assert lab.running() == {"e": 40}
            assert Counter(await asyncio.gather(*running)) == {"whole": 40}

    run_virtually(main())


def test_a_kill_beside_a_replica_that_serves_makes_nobody_wait():
    """One of two dies with short streams, just after it had come: all of them are at the other at once."""

    async def main():
        async with OutageLab(["a", "b"]) as lab:
            running = lab.ask(asked(i, 200, 600) for i in range(32))
            await asyncio.sleep(1.0)
            lab.kill("a")
            await lab.start("c")
            await asyncio.sleep(0.2)
            lab.kill("b")
            await asyncio.sleep(0.5)  # a step computes some of them, and the next one the others
            assert lab.running() == {"c": 32}
            assert Counter(await asyncio.gather(*running)) == {"whole": 32}

    run_virtually(main())


def test_what_moves_is_computed_a_step_at_a_time():
    """A replica dies with twenty long contexts: those that its neighbour gets leave room for whoever comes."""

    async def main():
        async with OutageLab(["a", "b"]) as lab:
            running = lab.ask(asked(i, 6_000, 900) for i in range(40))
            while lab.dispatcher.counters.prefilled < 40 * 6_000:
                await asyncio.sleep(0.1)
            lab.kill("a")
            await asyncio.sleep(0.5)
            waiting = lab.replicas["b"].stats.outstanding_tokens
            assert 0 < waiting <= MODEL.max_num_batched_tokens + 7_000, "all that moves was handed over at once"
            began = asyncio.get_running_loop().time()
            assert await lab.answer(asked(1000, 100, 1)) == "whole"
            assert asyncio.get_running_loop().time() - began < 1.5, "it stood behind all that moved"
            assert Counter(await asyncio.gather(*running)) == {"whole": 40}

    run_virtually(main())


def test_what_moves_does_not_wait_for_those_who_come():
    """Long prompts come all the time, and a replica dies with long contexts: these have half of what is computed."""

    async def main():
        clock = asyncio.get_running_loop().time
        numbers = itertools.count(1000)

        async def comes_again_and_again() -> None:
            while await lab.answer(asked(next(numbers), 12_000, 1)) == "whole":
                continue

        async with OutageLab("abc") as lab:
            running = lab.ask(asked(i, 12_000, 60) for i in range(36))
            while lab.dispatcher.counters.prefilled < 36 * 12_000:
                await asyncio.sleep(0.1)
            others = [asyncio.create_task(comes_again_and_again()) for _ in range(30)]
            await asyncio.sleep(2.0)
            lab.kill("a")
            began = clock()
            assert Counter(await asyncio.gather(*running)) == {"whole": 36}
            assert clock() - began < 30.0, "others came first, one after the other"
        await asyncio.gather(*others)

    run_virtually(main())
