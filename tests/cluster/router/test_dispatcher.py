"""The dispatcher: every accepted request ends in the exact answer or one typed error, whatever breaks."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.errors import ApiError
from cluster.replica.sessions import ReplicaTimes
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.replica_set import MESSAGES_PER_TURN
from cluster.token_source import TokenChunk
from cluster.wire.replica_messages import Report
from engine.errors import ConfigError
from tests.cluster.cluster_lab import Lab, long_request, oracle, until
from tests.engine.engine_driver import expected, request


async def test_tokens_are_those_of_an_undisturbed_run():
    async with Lab() as lab:
        await lab.start("a")
        await lab.start("b")
        requests = [request(f"r{i}", 3 + i, seed=i, temperature=i % 2, max_tokens=5 + i) for i in range(12)]
        results = await asyncio.gather(*map(lab.collect, requests))
        assert results == [oracle(r) for r in requests]
        assert lab.dispatcher.counters.outcomes == {"completed": 12}
        assert lab.dispatcher.counters.tokens == sum(len(t) for r in results for t in r.values())


async def test_first_token_arrives_while_the_engine_has_run_only_one_step():
    async with Lab() as lab:
        replica = await lab.start("a", steps=1)
        async with aclosing(lab.dispatcher.generate(long_request("r"))) as chunks:
            chunk = await anext(chunks)
        assert chunk.token_ids == tuple(expected(long_request("r"))[:1])
        assert replica.executor.executed == 1


async def test_rows_of_an_abandoned_attempt_are_dropped():
    async with Lab() as lab:
        replica = await lab.start("a", steps=1)
        async with aclosing(lab.dispatcher.generate(long_request("gone"))) as chunks:
            await anext(chunks)
        heard = replica.links[0].heard
        report = next(message for message in heard if isinstance(message, Report))
        late = Report(
            len([m for m in heard if isinstance(m, Report)]),
            report.incarnation,
            report.step,
            report.streams,
            report.indices,
            report.tokens,
            report.load,
        )
        before = lab.dispatcher.counters.stale_rows
        replica.links[0].inject(late)
        await until(lambda: lab.dispatcher.counters.stale_rows == before + 1)


async def test_misplaced_token_is_an_error_and_never_a_token():
    async with Lab() as lab:
        replica = await lab.start("a", steps=2)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports == 2)
        reports = [message for message in replica.links[0].heard if isinstance(message, Report)]
        last = reports[-1]
        replica.links[0].inject(
            Report(last.sequence + 1, last.incarnation, 9, last.streams, last.indices, last.tokens, last.load)
        )
        with pytest.raises(ApiError) as caught:
            await running
        assert (caught.value.code, caught.value.request_id) == ("internal_error", "r")
        assert lab.dispatcher.counters.misplaced_rows == 1
        replica.executor.allow(2)
        await replica.until_stats(lambda stats: stats.num_running == 0)


async def test_new_request_without_a_replica_is_refused_with_retry_after():
    async with Lab(DispatcherConfig(admission_wait=0.05)) as lab:
        with pytest.raises(ApiError) as caught:
            await lab.collect(long_request("r"))
        assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("no_replica", 503, 1)
        assert lab.dispatcher.counters.outcomes == {"no_replica": 1}
        assert lab.dispatcher.num_live == 0


async def test_new_request_waits_a_moment_for_the_first_replica():
    async with Lab() as lab:
        running = asyncio.create_task(lab.collect(long_request("r")))
        await asyncio.sleep(0)
        await lab.start("a")
        assert await running == oracle(long_request("r"))


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
async def test_closing_the_consumer_frees_the_request_on_its_replica(steps):
    """While it waits, prefills (a chunk of 64 of 90 tokens) and decodes: blocks are free within two steps."""
    async with Lab() as lab:
        replica = await lab.start("a", steps=steps)
        r = request("r", 90, max_tokens=30, ignore_eos=True)
        running = asyncio.create_task(lab.collect(r))
        await until(lambda: replica.core.num_requests == 1 and replica.executor.executed == steps)
        running.cancel()
        await asyncio.wait([running])
        assert lab.dispatcher.num_live == 0
        await until(lambda: replica.core.num_requests == 0)
        replica.executor.allow(2)
        await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
        assert replica.held_blocks == 0
        assert replica.executor.executed <= steps + 2
        assert lab.dispatcher.counters.outcomes == {"aborted": 1}


async def test_finished_choice_ends_alone_and_the_last_one_ends_the_request():
    async with Lab() as lab:
        replica = await lab.start("a", steps=4)
        r = long_request("r", n=2)
        seen: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in lab.dispatcher.generate(r):
            seen[chunk.choice].extend(chunk.token_ids)
            if chunk.choice == 0 and len(seen[0]) == 4:
                lab.dispatcher.finish_choice("r", 0)
                replica.executor.allow(16)
            if len(seen[1]) == 20:
                lab.dispatcher.finish_choice("r", 1)
        assert seen == {0: oracle(r)[0][:4], 1: oracle(r)[1][:20]}
        replica.executor.allow(2)
        assert lab.dispatcher.counters.outcomes == {"completed": 1}
        await until(lambda: replica.core.num_requests == 0)
        lab.dispatcher.finish_choice("r", 0)


@pytest.mark.parametrize(("pending", "logprobs"), [(8, None), (16, 1), (64, 20)])
async def test_slow_consumer_is_cut_off_and_others_are_not(pending, logprobs):
    """What waits for it is bounded in what it takes up: log-probabilities count."""
    async with Lab(DispatcherConfig(max_pending_tokens=pending)) as lab:
        replica = await lab.start("a", pace=0.001)
        slow = lab.dispatcher.generate(long_request("slow", logprobs=logprobs))
        first = await anext(slow)
        assert await lab.collect(long_request("quick", max_tokens=30)) == oracle(long_request("quick", max_tokens=30))
        await until(lambda: replica.core.num_requests == 0)
        tokens = list(first.token_ids)
        with pytest.raises(ApiError) as caught:
            async for chunk in slow:
                tokens.extend(chunk.token_ids)
        assert caught.value.code == "slow_consumer"
        assert tokens == expected(long_request("slow"))[: len(tokens)]
        assert len(tokens) <= 8 + 2


async def test_refused_request_gets_the_engines_error_and_the_link_goes_on():
    async with Lab() as lab:
        await lab.start("a")
        with pytest.raises(ApiError) as caught:
            await lab.collect(request("r", 200))
        assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
        with pytest.raises(ApiError) as caught:
            await lab.collect(request("r2", (10**6,)))
        assert caught.value.status == 400
        assert lab.lost == []
        assert await lab.collect(request("r3", 5)) == oracle(request("r3", 5))


async def test_request_that_came_with_its_choices_all_done_ends_at_once():
    async with Lab() as lab:
        await lab.start("a")
        done = replace(request("r", 5), resume={})
        assert [chunk async for chunk in lab.dispatcher.generate(done)] == []
        assert lab.dispatcher.counters.outcomes == {"completed": 1}


async def test_request_id_in_use_is_refused():
    async with Lab() as lab:
        await lab.start("a", steps=1)
        async with aclosing(lab.dispatcher.generate(long_request("r"))) as chunks:
            await anext(chunks)
            with pytest.raises(ApiError) as caught:
                await lab.collect(long_request("r"))
        assert caught.value.code == "duplicate_request"


async def test_prefixes_are_sent_where_they_are_cached():
    async with Lab() as lab:
        replicas = [await lab.start(name) for name in "abc"]
        prompt = tuple(1 + i % 7 for i in range(40))
        first = request("first", prompt)
        await lab.collect(first)
        chunks: list[TokenChunk] = []
        for i in range(6):
            async for chunk in lab.dispatcher.generate(request(f"r{i}", (*prompt, 1, 2, i))):
                chunks.append(chunk)
        assert all(chunk.num_cached_tokens == 40 for chunk in chunks)
        assert sorted(replica.core.stats.prompt_tokens > 0 for replica in replicas) == [False, False, True]


@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_cached_of_a_prompt_counts_once_however_many_choices_share_it(n):
    async with Lab() as lab:
        await lab.start("a")
        prompt = tuple(1 + i % 7 for i in range(40))
        await lab.collect(request("first", prompt))
        asked = request("r", (*prompt, 1, 2), n=n, temperature=1.0, ignore_eos=True)
        found = {chunk.num_cached_tokens async for chunk in lab.dispatcher.generate(asked)}
        assert found == {40}
        assert lab.dispatcher.counters.cached_tokens == 40


async def test_choices_that_move_find_nothing_of_their_own_prompt_cached():
    async with Lab() as lab:
        await lab.start("a", steps=4)
        asked = request("r", 40, n=3, temperature=1.0, max_tokens=30, ignore_eos=True)
        task = asyncio.create_task(lab.collect(asked))
        await until(lambda: lab.dispatcher.counters.tokens >= 3)
        await lab.start("b")
        lab.kill("a")
        assert await task == {choice: expected(asked, choice) for choice in range(3)}
        assert lab.dispatcher.counters.migrations == 1
        assert lab.dispatcher.counters.cached_tokens == 0


async def test_router_that_comes_later_learns_what_is_cached():
    async with Lab() as lab:
        first = await lab.start("a")
        prompt = tuple(1 + i % 7 for i in range(40))
        await lab.collect(request("first", prompt))
        first.links[0].cut("closed")
        await until(lambda: lab.lost == [("a", "closed")])
        await lab.link(first)
        await lab.start("b")
        await until(lambda: lab.dispatcher.counters.reports >= 1)
        for i in range(4):
            await lab.collect(request(f"r{i}", (*prompt, 1, 2, i)))
        assert lab.alive["b"].core.stats.prompt_tokens == 0


async def test_drain_refuses_the_new_and_waits_for_the_old():
    async with Lab() as lab:
        replica = await lab.start("a", steps=3)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        drained = asyncio.create_task(lab.dispatcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await lab.collect(long_request("new"))
        assert (caught.value.code, caught.value.status) == ("shutting_down", 503)
        assert not drained.done()
        replica.executor.allow(100)
        assert await running == oracle(long_request("r"))
        await asyncio.wait_for(drained, 5)


async def test_close_ends_every_request_with_one_typed_error():
    async with Lab() as lab:
        await lab.start("a", steps=3)
        running = [asyncio.create_task(lab.collect(long_request(f"r{i}"))) for i in range(3)]
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        await lab.dispatcher.close()
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [(type(e), e.code) for e in errors] == [(ApiError, "shutting_down")] * 3


async def test_figures_say_what_happened():
    async with Lab() as lab:
        await lab.start("a", times=ReplicaTimes(heartbeat=0.05))
        await lab.collect(long_request("r"))
        counters = lab.dispatcher.counters
        assert sum(counters.ttft.counts) == sum(counters.tpot.counts) == sum(counters.latency.counts) == 1
        assert (counters.prompt_tokens, counters.tokens) == (5, 40)
        assert counters.ttft.total < counters.latency.total
        view = lab.dispatcher.replicas()[0]
        assert (view.replica_id, view.ready, view.num_requests, view.load.generated_tokens) == ("a", True, 0, 40)


@pytest.mark.parametrize(
    ("name", "value"), [("stall_timeout", 0.0), ("quarantine_deaths", 1), ("max_pending_tokens", 0)]
)
async def test_wrong_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        DispatcherConfig(**{name: value})
    assert caught.value.flag == name


async def test_choice_finished_while_its_request_waits_for_a_replica_ends_it_in_good_order():
    """The text was complete with what had come before the kill: neither time nor another replica changes that."""
    async with Lab(DispatcherConfig(no_replica_timeout=0.05)) as lab:
        await lab.start("a", steps=4)
        seen = 0
        async for chunk in lab.dispatcher.generate(long_request("r")):
            seen += len(chunk.token_ids)
            if seen == 4:
                lab.kill("a")
                await until(lambda: len(lab.lost) == 1)
                lab.dispatcher.finish_choice("r", 0)
                survivor = await lab.start("b")
                await asyncio.sleep(0.1)
        assert survivor.core.stats.prompt_tokens == 0
        assert lab.dispatcher.counters.outcomes == {"completed": 1}


async def test_answer_that_is_whole_is_not_taken_back_when_the_server_stops():
    async with Lab() as lab:
        await lab.start("a")
        chunks = lab.dispatcher.generate(request("r", 5, max_tokens=3))
        tokens = list((await anext(chunks)).token_ids)
        await until(lambda: lab.alive["a"].core.num_requests == 0 and lab.dispatcher.replicas()[0].num_requests == 0)
        await lab.dispatcher.close()
        tokens += [token async for chunk in chunks for token in chunk.token_ids]
        assert tokens == expected(request("r", 5, max_tokens=3))
        assert lab.dispatcher.counters.outcomes == {"completed": 1}


async def test_request_that_no_message_can_carry_harms_nobody_and_leaves_nothing():
    async with Lab() as lab:
        waiting = [asyncio.create_task(lab.collect(r)) for r in (request("bad", (2**70,)), request("good", 5))]
        await until(lambda: lab.dispatcher.num_live == 2)
        await lab.start("a")
        error, good = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(error, ApiError)
        assert (error.status, error.param) == (400, "prompt")
        assert good == oracle(request("good", 5))
        with pytest.raises(ApiError):
            await lab.collect(request("bad", (2**70,)))
        assert lab.dispatcher.num_live == 0
        assert lab.lost == []


async def test_picture_of_a_drained_replicas_cache_goes_with_it():
    """A later life under the same name starts its updates anew, and is believed from the first one on."""
    async with Lab() as lab:
        replica = await lab.start("a", steps=3)
        prompt = tuple(1 + i % 7 for i in range(40))
        running = asyncio.create_task(lab.collect(request("first", prompt, max_tokens=5, ignore_eos=True)))
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        lab.dispatcher.remove_replica("a")
        replica.executor.allow(100)
        await running
        await until(lambda: lab.lost == [("a", "drained")])
        await lab.start("b")
        await lab.link(replica)
        await until(lambda: lab.dispatcher.counters.reports >= 6)
        for i in range(4):
            await lab.collect(request(f"r{i}", (*prompt, 1, 2, i)))
        assert lab.alive["b"].core.stats.prompt_tokens == 0


async def test_reports_that_come_in_one_burst_make_no_slow_consumer_of_a_quick_one():
    """The router was stopped for a while: consumers must get their turn between the reports that wait."""
    async with Lab(DispatcherConfig(max_pending_tokens=2 * MESSAGES_PER_TURN)) as lab:
        replica = await lab.start("a", steps=1)
        r = long_request("r", max_tokens=100)
        running = asyncio.create_task(lab.collect(r))
        await until(lambda: lab.dispatcher.counters.reports == 1)
        replica.links[0].hold()
        replica.executor.allow(100)
        await until(lambda: replica.core.num_requests == 0)
        replica.links[0].release()
        assert await running == oracle(r)
