"""Routers over simulated replicas, in virtual time: predictions come true, routers agree, tenants share nothing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from random import Random

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import cluster.replica.sessions
import cluster.router.prefix_index
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.metrics import RoutingCollector
from cluster.simulator.engine import simulated_tokens
from cluster.token_source import CallContext
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.simulator.cluster import SimulatedCluster, SimulatedModel
from tests.simulator.links import FaultPlan, FaultyLink, connect_local
from tests.simulator.virtual_time import run_virtually

MODEL = SimulatedModel(num_kv_blocks=512, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=512)
BLOCK = MODEL.block_size


def prompt(head: int, tail: int, head_len: int = 20 * BLOCK, tail_len: int = 24) -> tuple[int, ...]:
    """A prompt of a group: equal heads begin alike."""
    one, two = Random(head), Random(1000 + tail)
    return tuple(one.choices(range(3, 9000), k=head_len) + two.choices(range(3, 9000), k=tail_len))


def request(name: str, tokens: tuple[int, ...], salt: bytes = b"", output: int = 8) -> Request:
    params = SamplingParams(max_tokens=output, temperature=1.0, ignore_eos=True)
    return Request(name, tokens, params, seed=len(tokens), cache_salt=salt)


async def answer(router: Dispatcher, asked: Request, session: str = "") -> tuple[list[int], int]:
    """Return the tokens, checked against what they must be, and how many prompt tokens were cached."""
    tokens, cached = [], 0
    async for chunk in router.generate(asked, CallContext(session)):
        tokens += chunk.token_ids
        cached = chunk.num_cached_tokens
    length = len(asked.prompt_token_ids)
    seeds, positions = [asked.seed] * len(tokens), range(length, length + len(tokens))
    span = MODEL.vocab_size - 3
    assert tokens == simulated_tokens(np.array(seeds), np.array(positions), span).tolist()
    assert len(tokens) == asked.params.max_tokens
    return tokens, cached


def homes(cluster: SimulatedCluster) -> dict[str, int]:
    return {name: replica.stats.prompt_tokens for name, replica in cluster.replicas.items()}


def metric(router: Dispatcher, name: str) -> float:
    registry = CollectorRegistry()
    registry.register(RoutingCollector("demo", router.counters, router.caches))
    lines = generate_latest(registry).decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("policy", ["kv_aware", "session"])
def test_predicted_cache_hits_are_the_actual_ones_on_a_quiet_system(policy):
    async def main():
        async with SimulatedCluster(3, MODEL, DispatcherConfig(routing_policy=policy)) as cluster:
            (router,) = cluster.routers
            pick, found = Random(1), 0
            for i in range(60):
                tail_len = pick.choice([1, BLOCK, 24, 3 * BLOCK])
                asked = prompt(pick.randrange(6), pick.randrange(3), tail_len=tail_len)
                found += (await answer(router, request(f"r{i}", asked), f"s{i % 4}"))[1]
                await asyncio.sleep(0.1)
            actual = sum(replica.stats.prefix_hit_tokens for replica in cluster.replicas.values())
            assert router.counters.found_tokens == found == actual > 5000
            assert router.counters.predicted_tokens == actual
            assert metric(router, "squadron_router_predicted_cached_tokens_total") == actual
            assert metric(router, "squadron_router_actual_cached_tokens_total") == actual
            assert metric(router, "squadron_router_resyncs_total") == 0
            assert metric(router, "squadron_router_index_blocks") > 100

    run_virtually(main())


def test_two_routers_choose_the_same_home_for_nearly_all_of_a_shared_prefix_workload():
    async def main():
        async with SimulatedCluster(4, MODEL, num_routers=2) as cluster:
            pick = Random(2)
            chosen: dict[int, dict[int, list[str]]] = defaultdict(lambda: {0: [], 1: []})

            async def ask(i: int, head: int, which: int) -> None:
                before = homes(cluster)
                asked = request(f"r{i}", prompt(head, i), output=2)
                await answer(cluster.routers[which], asked)
                moved = [name for name, tokens in homes(cluster).items() if tokens != before[name]]
                chosen[head][which] += moved

            for i in range(240):
                await ask(i, pick.randrange(24), i % 2)
                await asyncio.sleep(0.05)
            agreed = total = 0
            for by_router in chosen.values():
                both = by_router[0] + by_router[1]
                total += len(both)
                agreed += max(both.count(name) for name in set(both))
            assert total == 240
            assert agreed >= 0.95 * total
            assert len({name for by_router in chosen.values() for name in by_router[0]}) == 4

    run_virtually(main())


def test_a_lost_router_loses_its_own_streams_alone_and_leaves_no_block_behind():
    async def main():
        async with SimulatedCluster(2, MODEL, num_routers=2) as cluster:
            lost, kept = cluster.routers
            kept_tasks = [
                asyncio.create_task(answer(kept, request(f"k{i}", prompt(i, i), output=200))) for i in range(8)
            ]
            lost_tasks = [
                asyncio.create_task(answer(lost, request(f"l{i}", prompt(i, i), output=1500))) for i in range(8)
            ]
            await asyncio.sleep(0.5)
            assert sum(replica.num_requests for replica in cluster.replicas.values()) == 16
            await lost.close()
            await asyncio.sleep(0.1)
            assert sum(replica.num_requests for replica in cluster.replicas.values()) == 8
            assert all(len(tokens) == 200 for tokens, _ in await asyncio.gather(*kept_tasks))
            ends = await asyncio.gather(*lost_tasks, return_exceptions=True)
            assert {getattr(end, "code", "none") for end in ends} == {"shutting_down"}
            await asyncio.sleep(0.5)
            for replica in cluster.replicas.values():
                stats = replica.stats
                assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total

    run_virtually(main())


@pytest.mark.parametrize("seed", range(6))
def test_lost_and_late_news_of_a_cache_are_asked_for_again_and_cost_no_token(seed):
    async def main():
        config = DispatcherConfig(resync_interval=0.2)
        async with SimulatedCluster(2, MODEL, config, num_routers=0) as cluster:
            router = Dispatcher(config, Random(seed))
            links = []
            for replica in cluster.replicas.values():
                plan = FaultPlan(drop_blocks=0.3, late_blocks=0.2)
                links.append(FaultyLink(await connect_local(replica.serve, "router"), plan, Random(seed)))
                router.add_link(links[-1])
            pick = Random(seed)
            for i in range(60):
                # More than the caches hold, so that blocks are given up all the time.
                await answer(router, request(f"r{i}", prompt(pick.randrange(40), i, head_len=40 * BLOCK)))
            assert router.caches.num_resyncs > 0
            for link in links:
                link._plan = FaultPlan()
            await asyncio.sleep(3.0)
            for name, replica in cluster.replicas.items():
                assert known_of(router, name) == set(replica._sessions._cached._keys), name
            await router.close()
            for link in links:
                await link.wait_closed()

    run_virtually(main())


def known_of(router: Dispatcher, name: str) -> set[int]:
    index = router.caches.index
    bit = 1 << index._bits[name]
    return {key for key, bits in index._holders.items() if bits & bit}


@pytest.mark.parametrize("collide", [False, True])
def test_a_prefix_is_never_found_across_tenants_even_where_all_names_collide(collide, monkeypatch):
    """The router's short names only steer: where all are equal it expects too much, and the engine finds nothing."""
    if collide:
        monkeypatch.setattr(cluster.replica.sessions, "block_key", lambda _: 7)
        monkeypatch.setattr(cluster.router.prefix_index, "block_key", lambda _: 7)

    async def main():
        async with SimulatedCluster(2, MODEL) as simulated:
            (router,) = simulated.routers
            for i in range(6):
                _, cached = await answer(router, request(f"r{i}", prompt(1, 1), salt=b"tenant-%d" % i))
                assert cached == 0
            assert sum(replica.stats.prefix_hit_tokens for replica in simulated.replicas.values()) == 0
            assert router.counters.found_tokens == 0
            assert (router.counters.predicted_tokens > 0) == collide
            _, cached = await answer(router, request("again", prompt(1, 1), salt=b"tenant-5"))
            if not collide:
                assert cached == 21 * BLOCK

    run_virtually(main())


def test_a_session_stays_on_one_replica_though_its_prompts_have_nothing_in_common():
    async def main():
        async with SimulatedCluster(4, MODEL, DispatcherConfig(routing_policy="session")) as cluster:
            (router,) = cluster.routers
            seen = set()
            for i in range(12):
                await answer(router, request(f"r{i}", prompt(i, i)), "one-talk")
                seen |= {name for name, tokens in homes(cluster).items() if tokens}
            assert len(seen) == 1
            for i in range(12, 60):
                await answer(router, request(f"r{i}", prompt(i, i)), f"talk-{i}")
            assert all(homes(cluster).values())

    run_virtually(main())


def test_a_session_of_another_tenant_is_another_session():
    """Whoever knows a session's id must not be able to fill the replica that it is on."""

    async def main():
        async with SimulatedCluster(4, MODEL, DispatcherConfig(routing_policy="session")) as cluster:
            for i in range(40):
                await answer(cluster.routers[0], request(f"r{i}", prompt(i, i), salt=b"tenant-%d" % i), "one-talk")
            assert all(homes(cluster).values())

    run_virtually(main())


def test_the_same_seed_gives_the_same_run():
    def run() -> list[int]:
        async def main():
            async with SimulatedCluster(3, MODEL, seed=4) as cluster:
                tasks = [answer(cluster.routers[0], request(f"r{i}", prompt(i % 7, i))) for i in range(40)]
                await asyncio.gather(*tasks)
                return [*homes(cluster).values(), round(asyncio.get_running_loop().time() * 1e9)]

        return run_virtually(main())

    assert run() == run()


def test_a_consumer_that_leaves_frees_its_simulated_blocks():
    async def main():
        async with SimulatedCluster(1, MODEL) as cluster:
            (replica,) = cluster.replicas.values()
            async with aclosing(cluster.routers[0].generate(request("r", prompt(1, 1), output=500))) as chunks:
                await anext(chunks)
            await asyncio.sleep(0.1)
            assert replica.num_requests == 0
            assert replica.stats.num_running == 0

    run_virtually(main())
