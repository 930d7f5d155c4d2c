"""A router's requests outlive replicas that die, hang, leave or are replaced: each goes on at its next token."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

import pytest

from cluster.config_values import MIGRATIONS, SAME_WEIGHTS
from cluster.errors import ApiError
from cluster.replica.sessions import ReplicaTimes
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.wire import tcp
from cluster.wire.replica_messages import Report
from tests.cluster.cluster_lab import GatedExecutor, Lab, LabReplica, long_request, oracle, until
from tests.engine.engine_driver import expected, request
from tests.simulator.links import FaultPlan


@pytest.mark.parametrize("phase", range(6))
async def test_killed_replica_costs_no_token(phase):
    """Killed before the first step, after it, and later; another replica goes on at the next position."""
    async with Lab(seed=phase) as lab:
        await lab.start("a", steps=phase)
        requests = [long_request(f"r{i}", seed=i, logprobs=1 if i % 2 else None) for i in range(4)]
        running = [asyncio.create_task(lab.collect(r)) for r in requests]
        await until(lambda: lab.dispatcher.counters.reports >= phase)
        await lab.start("b")
        lab.kill("a")
        assert await asyncio.gather(*running) == [oracle(r) for r in requests]
        assert lab.dispatcher.counters.migrations == 4


async def test_finished_choices_are_not_run_again_after_a_kill():
    async with Lab() as lab:
        await lab.start("a", steps=12)
        r = request("r", 5, seed=3, n=4, temperature=1.0, max_tokens=40, stop_token_ids=tuple(range(1, 8)))
        lengths = sorted(len(tokens) for tokens in oracle(r).values())
        assert lengths[0] < 12 < lengths[-1], "the seed must give choices on both sides of the kill"
        running = asyncio.create_task(lab.collect(r))
        await until(lambda: lab.dispatcher.counters.reports >= 12)
        survivor = await lab.start("b")
        lab.kill("a")
        assert await running == oracle(r)
        assert survivor.core.stats.generated_tokens == sum(max(0, length - 12) for length in lengths)


async def test_reports_of_a_former_life_are_dropped():
    """A partition heals and the old replica's words arrive late, repeated, on its own link and on the new one's."""
    async with Lab(DispatcherConfig(stall_timeout=0.4)) as lab:
        await lab.start("a", steps=6)
        old = lab.alive["a"].links[0]
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 6)
        replayed = [message for message in old.heard if isinstance(message, Report)]
        old.hold()
        lab.alive["a"].executor.allow(10)
        new = await lab.start("b", steps=10)
        await until(lambda: lab.lost == [("a", "stalled")])
        await until(lambda: new.executor.executed == 10)
        old.release()
        for message in [*replayed, *reversed(replayed)]:
            old.inject(message)
            new.links[0].inject(message)
        new.executor.allow(100)
        assert await running == oracle(long_request("r"))
        assert lab.dispatcher.counters.stale_reports == 2 * len(replayed)


async def test_missing_report_closes_the_link_and_the_request_goes_on_elsewhere():
    async with Lab() as lab:
        await lab.start("a", plan=FaultPlan(drop_down=0.3))
        await lab.start("b")
        requests = [long_request(f"r{i}", seed=i) for i in range(8)]
        assert await asyncio.gather(*map(lab.collect, requests)) == [oracle(r) for r in requests]
        assert set(lab.lost) == {("a", "damaged")}


async def test_requests_survive_the_loss_of_all_replicas_if_one_comes_back():
    async with Lab() as lab:
        await lab.start("a", steps=5)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 5)
        lab.kill("a")
        await until(lambda: not lab.dispatcher.ready)
        await lab.start("a2")
        assert await running == oracle(long_request("r"))


async def test_running_request_gets_one_typed_error_when_no_replica_comes_back():
    async with Lab(DispatcherConfig(no_replica_timeout=0.1)) as lab:
        await lab.start("a", steps=5)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 5)
        lab.kill("a")
        with pytest.raises(ApiError) as caught:
            await running
        assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("replica_lost", 503, 1)


async def test_choice_finished_by_the_consumer_is_not_migrated():
    async with Lab() as lab:
        await lab.start("a", steps=4)
        r = long_request("r", n=2)
        seen: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in lab.dispatcher.generate(r):
            seen[chunk.choice].extend(chunk.token_ids)
            if chunk.choice == 0:
                lab.dispatcher.finish_choice("r", 0)
            if chunk.choice == 1 and len(seen[1]) == 4:
                survivor = await lab.start("b")
                lab.kill("a")
        assert seen == {0: oracle(r)[0][: len(seen[0])], 1: oracle(r)[1]}
        assert 1 <= len(seen[0]) <= 4
        assert survivor.core.stats.generated_tokens == 36


async def test_draining_replica_sends_new_requests_elsewhere_and_finishes_its_own():
    async with Lab() as lab:
        old = await lab.start("a", steps=3)
        running = asyncio.create_task(lab.collect(long_request("old")))
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        new = await lab.start("b")
        old.core.drain()
        assert await lab.collect(long_request("new")) == oracle(long_request("new"))
        assert new.core.stats.generated_tokens == 40
        old.executor.allow(100)
        assert await running == oracle(long_request("old"))
        await asyncio.wait_for(old.core.drained(), 5)
        await until(lambda: lab.lost == [("a", "drained")])
        assert lab.dispatcher.counters.migrations == 0


async def test_submit_that_crosses_the_news_of_draining_is_served_where_it_went():
    async with Lab() as lab:
        old = await lab.start("a")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await asyncio.sleep(0)  # now it is sent, and cannot have been read
        assert (lab.dispatcher.num_live, old.core.num_requests) == (1, 0)
        old.core.drain()
        await lab.start("b")
        assert await running == oracle(long_request("r"))
        assert old.core.stats.generated_tokens == 40
        await until(lambda: lab.lost == [("a", "drained")])


async def test_a_removed_replica_finishes_what_it_runs():
    async with Lab() as lab:
        old = await lab.start("a", steps=3)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        new = await lab.start("b")
        lab.dispatcher.remove_replica("a")
        old.executor.allow(100)
        assert await running == oracle(long_request("r"))
        assert new.core.stats.generated_tokens == 0
        await until(lambda: lab.lost == [("a", "drained")])
        lab.dispatcher.remove_replica("nobody")


@pytest.mark.parametrize("same_model", [True, False])
async def test_what_overstays_on_a_draining_replica_goes_on_elsewhere_only_on_the_same_model(same_model):
    async with Lab(DispatcherConfig(hand_over_after=0.1, ping_interval=0.1)) as lab:
        old = await lab.start("a", steps=3, fingerprint="v1")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        new = await lab.start("b", fingerprint="v1" if same_model else "v2")
        lab.dispatcher.remove_replica("a")
        if same_model:
            await until(lambda: lab.dispatcher.counters.migrations == 1)
        else:
            await asyncio.sleep(0.5)  # many times over what it may stay
            old.executor.allow(100)
        assert await running == oracle(long_request("r"))
        assert new.core.stats.generated_tokens == (37 if same_model else 0)


@pytest.mark.parametrize("first", ["the successor", "the announcement"])
async def test_what_a_replica_hands_over_goes_on_elsewhere_at_once_and_not_before_there_is_another(first):
    """With the default times: nothing is waited for, and no link is lost."""
    async with Lab() as lab:
        old = await lab.start("a", steps=3)
        running = [asyncio.create_task(lab.collect(long_request(f"r{seed}", seed=seed))) for seed in range(3)]
        await until(lambda: lab.dispatcher.counters.reports >= 3)
        if first == "the announcement":
            old.core.drain(hand_over=True)
            await until(lambda: lab.dispatcher.replicas()[0].draining)
            old.executor.allow(2)
            await until(lambda: lab.dispatcher.counters.reports >= 5)
            assert lab.dispatcher.counters.migrations == 0, "there is nobody who could go on"
        await lab.start("b")
        old.core.drain(hand_over=True)
        results = await asyncio.gather(*running)
        assert results == [oracle(long_request(f"r{seed}", seed=seed)) for seed in range(3)]
        assert lab.dispatcher.counters.migrations == 3
        await until(lambda: lab.lost == [("a", "drained")])
        events = (await lab.dispatcher.explain("r0")).events
        assert any("is to go" in event.event.detail for event in events)


def begun(lab: Lab) -> int:
    """Return how many requests the router knows to be computed."""
    lives = [live for member in lab.dispatcher._replicas.linked for live in member.live.values()]
    return sum(live.attempt is not None and live.attempt.begun for live in lives)


async def test_a_suspect_stays_on_a_draining_replica_until_one_without_another_suspect_can_take_it():
    async with Lab(DispatcherConfig(quarantine_deaths=2)) as lab:
        requests = [long_request("r0", seed=0), long_request("r1", seed=1)]
        running = [asyncio.create_task(lab.collect(one)) for one in requests]
        await until(lambda: lab.dispatcher.num_waiting == 2)  # so that they begin in one step
        await lab.start("a", steps=0)
        await until(lambda: begun(lab) == 2)  # else nobody is blamed
        leaving = await lab.start("b", steps=0)
        staying = await lab.start("c", steps=0)
        lab.kill("a")
        await until(lambda: leaving.core.num_requests == staying.core.num_requests == 1)
        lab.dispatcher.remove_replica("b")
        (member,) = (one for one in lab.dispatcher._replicas.linked if one.replica_id == "b")
        lab.dispatcher._placement.on_overstay(member)
        assert lab.dispatcher.queue().requests == 0, "it would wait for a replica, though it has one"
        staying.executor.allow(1)
        await until(lambda: lab.dispatcher.counters.tokens == 1)
        lab.dispatcher._placement.on_overstay(member)
        staying.executor.allow(100)
        assert await asyncio.gather(*running) == [oracle(one) for one in requests]
        assert leaving.core.stats.generated_tokens == 0


async def test_who_waits_behind_a_suspect_is_not_given_up_beside_a_replica_that_serves():
    async with Lab(DispatcherConfig(quarantine_deaths=2, no_replica_timeout=0.2)) as lab:
        requests = [long_request("r0", seed=0), long_request("r1", seed=1)]
        running = [asyncio.create_task(lab.collect(one)) for one in requests]
        await until(lambda: lab.dispatcher.num_waiting == 2)  # so that they begin in one step
        await lab.start("a", steps=0)
        await until(lambda: begun(lab) == 2)  # else nobody is blamed
        second = await lab.start("b", steps=0)
        lab.kill("a")
        await until(lambda: second.core.num_requests == 1)
        await asyncio.sleep(0.5)  # more than twice as long as it would wait without a replica
        second.executor.allow(1000)
        assert await asyncio.gather(*running) == [oracle(one) for one in requests]


async def test_silent_replica_is_given_up_and_its_requests_go_on():
    async with Lab(DispatcherConfig(stall_timeout=0.3)) as lab:
        await lab.start("a", steps=4)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        await lab.start("b")
        lab.alive["a"].links[0].hold()
        assert await running == oracle(long_request("r"))
        assert lab.lost == [("a", "stalled")]


async def test_replica_that_speaks_but_does_not_step_is_given_up_after_its_own_deadline():
    async with Lab(DispatcherConfig(stall_timeout=0.3, progress_timeout=0.8)) as lab:
        await lab.start("a", steps=4)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        assert lab.dispatcher.ready
        await until(lambda: not lab.dispatcher.ready)
        assert lab.lost == []
        await lab.start("b")
        assert await running == oracle(long_request("r"))
        assert lab.lost == [("a", "stalled")]


async def test_short_pause_of_the_network_kills_nobody():
    async with Lab(DispatcherConfig(stall_timeout=2.0), seed=1) as lab:
        replica = await lab.start("a", plan=FaultPlan(delay=0.02))
        requests = [long_request(f"r{i}", seed=i, max_tokens=10) for i in range(4)]
        running = [asyncio.create_task(lab.collect(r)) for r in requests]
        await until(lambda: lab.dispatcher.counters.reports >= 1)
        replica.links[0].hold()
        await asyncio.sleep(0.2)
        replica.links[0].release()
        assert await asyncio.gather(*running) == [oracle(r) for r in requests]
        assert lab.lost == []


async def test_time_in_which_the_router_did_not_run_is_no_silence_of_the_replica():
    async with Lab(DispatcherConfig(stall_timeout=0.4)) as lab:
        await lab.start("a")
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        resume = loop.time() + 0.6
        while loop.time() < resume:
            pass
        await asyncio.sleep(0.2)
        assert lab.lost == []
        assert await lab.collect(long_request("r")) == oracle(long_request("r"))


async def test_request_that_kills_its_replicas_is_quarantined_and_bystanders_are_not():
    poison = 60
    async with Lab() as lab:

        def revive(name: str, code: str) -> None:
            lab.graveyard.append(lab.alive.pop(name))
            tasks.append(asyncio.create_task(lab.start(f"{name}'", poison=poison, pace=0.001)))

        tasks: list[asyncio.Task] = []
        lab.on_lost = revive
        await lab.start("a", poison=poison, pace=0.001)
        await lab.start("b", poison=poison, pace=0.001)
        # Prompts in which the fake model never says the poisonous token, fresh ones at the same time as the poison.
        safe = [r for i in range(60) if poison not in (r := long_request(f"r{i}", seed=i)).prompt_token_ids]
        safe = [r for r in safe if poison not in expected(r)][:10]
        poisonous = request("p", (1, 2, poison), max_tokens=5)
        running = [asyncio.create_task(lab.collect(r)) for r in [*safe[:5], poisonous, *safe[5:]]]
        results = await asyncio.gather(*running, return_exceptions=True)
        error = results.pop(5)
        assert isinstance(error, ApiError)
        assert (error.code, error.status, error.retryable) == ("request_quarantined", 500, False)
        assert results == [oracle(r) for r in safe]
        assert lab.dispatcher.counters.links_lost == {"engine_dead": 3}
        lab.on_lost = lambda name, code: None
        await asyncio.gather(*tasks)


async def test_links_that_end_in_good_order_blame_no_request():
    async with Lab(DispatcherConfig(quarantine_deaths=2)) as lab:
        running = asyncio.create_task(lab.collect(long_request("r")))
        for i in range(4):
            replica = await lab.start(f"a{i}", steps=0)
            await until(lambda replica=replica: replica.core.num_requests == 1)
            replica.links[0].cut("closed", "rolling update")
            await until(lambda i=i: len(lab.lost) == i + 1)
        await lab.start("b")
        assert await running == oracle(long_request("r"))


async def test_real_links_carry_requests_over_the_death_of_a_replica():
    """The same over sockets: one replica's connection breaks in the middle, the other one goes on."""
    async with Lab() as lab:
        replicas = [LabReplica(name, GatedExecutor(512, 6), 512, ReplicaTimes()) for name in "ab"]
        lab.graveyard += replicas
        servers = [tcp.LinkServer(replica.core.serve) for replica in replicas]
        links = [await tcp.connect(await server.start(), "router") for server in servers]
        lab.dispatcher.add_link(links[0])
        requests = [long_request(f"r{i}", seed=i, n=1 + i % 2) for i in range(6)]
        running = [asyncio.create_task(lab.collect(r)) for r in requests]
        await until(lambda: lab.dispatcher.counters.reports >= 6)
        lab.dispatcher.add_link(links[1])
        replicas[1].executor.allow(100)
        replicas[0].core.on_dead("rank 1: killed")
        assert await asyncio.gather(*running) == [oracle(r) for r in requests]
        assert lab.dispatcher.counters.links_lost == {"engine_dead": 1}
        for server in servers:
            await server.close()


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_kills_cuts_repeats_and_delays_leaves_every_token_in_its_place(seed):
    rng = Random(seed)
    async with Lab(DispatcherConfig(stall_timeout=0.5), seed=seed) as lab:

        def plan() -> FaultPlan:
            return FaultPlan(
                repeat=rng.choice([0.0, 0.3]),
                drop_down=rng.choice([0.0, 0.0, 0.05]),
                delay=rng.choice([0.0, 0.0, 0.005]),
                cut_after=rng.choice([None, rng.randrange(1, 40)]),
            )

        for name in ("a", "b"):
            await lab.start(name, plan=plan(), pace=0.001)
        requests = [
            long_request(
                f"r{i}", seed=i, n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 60), ignore_eos=i % 2 == 0
            )
            for i in range(16)
        ]
        running = [asyncio.create_task(lab.collect(r)) for r in requests]
        number = rounds = 0
        while not all(task.done() for task in running):
            await asyncio.sleep(rng.random() * 0.05)
            name = rng.choice(sorted(lab.alive))
            # Faults end, or a slow machine would get nothing done between them; closed links are replaced to the end.
            rounds += 1
            fault = rng.choice(["kill", "cut", "hold", "nothing"]) if rounds < 40 else "nothing"
            replica = lab.alive[name]
            if fault == "kill" or replica.links[-1].closed:
                number += 1
                lab.kill(name)
                await lab.start(f"{name[0]}{number}", plan=plan() if rounds < 40 else None, pace=0.001)
            elif fault == "cut":
                replica.links[-1].cut()
                await lab.link(replica, plan())
            elif fault == "hold":
                replica.links[-1].hold()
        assert [task.result() for task in running] == [oracle(r) for r in requests]
        assert lab.dispatcher.counters.misplaced_rows == 0
        assert lab.dispatcher.counters.accepted == lab.dispatcher.counters.outcomes["completed"] == 16
        for replica in lab.alive.values():
            for link in replica.links:
                link.release()
            await until(lambda replica=replica: replica.core.num_requests == 0)


async def test_lost_link_to_a_living_replica_frees_its_requests_there():
    async with Lab() as lab:
        replica = await lab.start("a", steps=4)
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        replica.links[0].cut()
        await until(lambda: replica.core.num_requests == 0)
        await lab.link(replica)
        replica.executor.allow(100)
        assert await running == oracle(long_request("r"))
        await replica.until_stats(lambda stats: stats.num_running == 0)
        assert replica.held_blocks == 0


async def test_draining_replica_is_let_go_when_its_last_request_was_refused():
    async with Lab() as lab:
        await lab.start("a")
        refused = asyncio.create_task(lab.collect(request("r", 200)))
        await asyncio.sleep(0)  # now it is sent, and no answer can have been read
        assert lab.dispatcher.num_live == 1
        lab.dispatcher.remove_replica("a")
        with pytest.raises(ApiError):
            await refused
        await until(lambda: lab.lost == [("a", "drained")])


async def test_replica_that_gives_a_silent_router_up_is_no_death_to_blame_a_request_for():
    config = DispatcherConfig(quarantine_deaths=2, ping_interval=60.0, stall_timeout=60.0)
    async with Lab(config) as lab:
        replica = await lab.start("a", steps=0, times=ReplicaTimes(heartbeat=0.05, router_timeout=0.1))
        running = asyncio.create_task(lab.collect(long_request("r")))
        for times in itertools.count(1):
            await until(lambda times=times: running.done() or len(lab.lost) == times)
            if running.done():
                break
            await lab.link(replica)
            if times == 3:
                replica.executor.allow(100)
        assert await running == oracle(long_request("r"))


async def test_stream_goes_on_only_where_the_same_model_runs():
    """A rolling update: the old replica dies while one of the same model and several of the next one are there."""
    async with Lab() as lab:
        await lab.start("old", steps=6, fingerprint="v1")
        requests = [long_request(f"r{i}", seed=i) for i in range(4)]
        running = [asyncio.create_task(lab.collect(r)) for r in requests]
        await until(lambda: lab.dispatcher.counters.reports >= 6)
        new = [await lab.start(f"new{i}", fingerprint="v2") for i in range(3)]
        same = await lab.start("same", fingerprint="v1")
        lab.kill("old")
        assert await asyncio.gather(*running) == [oracle(r) for r in requests]
        assert same.core.stats.generated_tokens == 4 * 34
        assert [replica.core.stats.generated_tokens for replica in new] == [0, 0, 0]


@pytest.mark.parametrize("waits", [False, True], ids=["new-model-is-there", "new-model-comes-later"])
async def test_stream_ends_with_an_honest_error_when_only_another_model_is_left(waits):
    async with Lab() as lab:
        await lab.start("old", steps=4, fingerprint="v1")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        if waits:
            lab.kill("old")
            await until(lambda: len(lab.lost) == 1)
        new = await lab.start("new", fingerprint="v2")
        if not waits:
            lab.kill("old")
        with pytest.raises(ApiError) as caught:
            await running
        assert (caught.value.code, caught.value.status, caught.value.retryable) == ("model_changed", 503, True)
        assert new.core.stats.prompt_tokens == 0
        assert await lab.collect(long_request("again")) == oracle(long_request("again"))


@pytest.mark.parametrize("stream_migration", MIGRATIONS)
@pytest.mark.parametrize("other", ["w.d.other", "w.other.a", "other.d.a", "w"])
async def test_a_stream_parts_in_no_silence(stream_migration, other, caplog):
    """An update of Squadron or torch, or another machine: the same weights are drawn from, or rounded, otherwise."""
    goes_on = (stream_migration, other) == (SAME_WEIGHTS, "w.d.other")
    async with Lab(DispatcherConfig(stream_migration=stream_migration)) as lab:
        await lab.start("old", steps=4, fingerprint="w.d.a")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        new = await lab.start("new", fingerprint=other)
        lab.kill("old")
        if goes_on:
            assert await running == oracle(long_request("r"))
            assert "replica new may round otherwise" in caplog.text
            return
        with pytest.raises(ApiError) as caught:
            await running
        assert (caught.value.code, caught.value.retryable) == ("model_changed", True)
        assert "compute it otherwise" in str(caught.value)
        assert new.core.stats.prompt_tokens == 0


@pytest.mark.parametrize("stream_migration", MIGRATIONS)
async def test_a_stream_that_goes_on_as_it_was_is_told_of_by_nobody(stream_migration, caplog):
    async with Lab(DispatcherConfig(stream_migration=stream_migration)) as lab:
        await lab.start("old", steps=4, fingerprint="w.d.a")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.counters.reports >= 4)
        await lab.start("same", fingerprint="w.d.a")
        lab.kill("old")
        assert await running == oracle(long_request("r"))
    assert "round otherwise" not in caplog.text


async def test_request_that_has_no_token_yet_may_start_on_another_model():
    async with Lab() as lab:
        await lab.start("old", steps=0, fingerprint="v1")
        running = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.alive["old"].core.num_requests == 1)
        await lab.start("new", fingerprint="v2")
        lab.kill("old")
        assert await running == oracle(long_request("r"))
