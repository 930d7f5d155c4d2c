"""What is let in and what is refused: tokens of room, drain rates, priorities, and a herd ten times too large."""

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.admission.capacity import (
    UNBOUNDED,
    DrainRate,
    InflightBounds,
    InflightConfig,
    OutputLength,
    ReplicaCapacity,
)
from cluster.admission.fair_queue import FairQueue
from cluster.admission.keys import OPEN
from cluster.config import parse_config
from cluster.errors import ApiError
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.live_model import admission_queue
from cluster.token_source import TokenChunk
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import request as engine_request
from tests.fake_source import FakeSource
from tests.grpc_client import refusal_of, serving_grpc
from tests.openai_app import MODEL, app_for, client_for, served_model
from tests.simulator.cluster import SimulatedCluster, SimulatedModel
from tests.simulator.virtual_time import run_virtually

SLOTS, PROMPT, OUTPUT, STEP = 8, 40, 20, 0.05  # a step of the modelled replicas draws a token for each sequence


def request(name, prompt=PROMPT, output=OUTPUT, priority=0, n=1):
    params = SamplingParams(n=n, max_tokens=output, temperature=1.0)
    return Request(name, (1,) * prompt, params, priority=priority)


@dataclass
class Replicas:
    """Implements `TokenSource`: `SLOTS` sequences run at a time, the rest waits inside, in order."""

    cached: int = 0
    work: int = 0
    started: list = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))

    async def generate(self, one, context=None):
        async with self.slots:
            self.started.append(one.request_id)
            for token in range(one.params.max_tokens):
                await asyncio.sleep(STEP)
                self.work += 1 if token else 1 + len(one.prompt_token_ids)
                reason = "length" if token + 1 == one.params.max_tokens else None
                yield TokenChunk(0, (token,), (), reason, self.cached)

    def finish_choice(self, request_id, choice):
        raise AssertionError("not expected")


async def ask(admission, one, tenant="t"):
    """Run a request; returns seconds to the first token, or the error and the seconds until it came."""
    loop = asyncio.get_running_loop()
    began, first = loop.time(), None
    try:
        async with aclosing(admission.generate(tenant, one)) as chunks:
            async for _ in chunks:
                first = first or loop.time() - began
            admission.charge(tenant, one.params.max_tokens)
    except ApiError as error:
        return error, loop.time() - began
    return first


def gate_of(source, bound=SLOTS + 2, tokens=UNBOUNDED, **config):
    return AdmissionQueue(source, lambda: bound, AdmissionConfig(**config), lambda: tokens, lambda: source.work)


# --- the herd (FAULTS 33)


def test_of_a_herd_ten_times_too_large_those_let_in_are_served_in_time_and_the_others_refused_at_once():
    async def play():
        source = Replicas()
        admission = gate_of(source, target_ttft=1.0)
        capacity = SLOTS / (OUTPUT * STEP)  # requests per second
        tasks, refused_after = [], []
        for i in range(int(10 * capacity * 10)):  # ten seconds of ten times the load
            tasks.append(asyncio.create_task(ask(admission, request(f"r{i}"))))
            await asyncio.sleep(0.1 / capacity)
        results = await asyncio.gather(*tasks)
        served = [one for one in results if isinstance(one, float)]
        errors = [one for one in results if not isinstance(one, float)]
        refused_after = sorted(seconds for _, seconds in errors)
        assert {(error.status, error.code) for error, _ in errors} == {(429, "overloaded")}
        assert max(served) <= 2.0, "twice the target"
        assert len(served) >= 0.9 * capacity * 10, "the replicas were kept busy"
        assert len(source.started) == len(served), "nothing that was refused had begun"
        assert refused_after[int(0.8 * len(refused_after))] < 0.01, "refused at once, not after waiting"
        assert (admission.num_inside, admission.tokens_inside, admission.num_waiting) == (0, 0, 0)

    run_virtually(play())


def test_a_herd_before_real_schedulers_is_served_in_time_or_refused_at_once():
    """Ten times the load for five seconds on two simulated replicas behind a real router; whole, exact counts."""

    async def play():
        model = SimulatedModel(max_num_seqs=16, max_num_batched_tokens=512, num_kv_blocks=512, max_model_len=1024)
        sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
        config = parse_config({"model": "demo", "target_ttft": 1.0, "replicas": 2} | sizes)
        async with SimulatedCluster(2, model) as cluster:
            admission = admission_queue(config, cluster.routers[0])
            tasks = []
            for i in range(3500):
                params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.0)
                one = Request(f"r{i}", (1 + i,) * 100, params)
                tasks.append(asyncio.create_task(ask(admission, one)))
                await asyncio.sleep(5 / 3500)
            results = await asyncio.gather(*tasks)
            counters = cluster.routers[0].counters
        served = [one for one in results if isinstance(one, float)]
        errors = [one for one in results if not isinstance(one, float)]
        assert {error.code for error, _ in errors} == {"overloaded"}
        assert max(served) <= 2.0, "twice the target"
        assert len(served) > 200
        at_once = sum(1 for _, seconds in errors if seconds < 0.01)
        assert at_once >= 0.8 * len(errors)
        assert counters.outcomes == {"completed": len(served)}
        assert counters.tokens == 50 * len(served)
        assert (admission.num_inside, admission.tokens_inside, admission.num_waiting) == (0, 0, 0)

    run_virtually(play())


def test_retry_after_is_the_time_that_the_queue_takes_to_drain():
    async def play():
        source = Replicas()
        admission = gate_of(source, max_wait=3.0)
        tasks = [asyncio.create_task(ask(admission, request(f"r{i}"))) for i in range(100)]
        await asyncio.sleep(2.0)
        behind = admission.num_waiting
        per_second = SLOTS / (OUTPUT * STEP)
        error, seconds = await ask(admission, request("late"))
        assert seconds == 0
        assert error.retry_after == pytest.approx(behind / per_second, rel=0.3)
        assert f"try again in {error.retry_after} s" in error.message
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(play())


def test_what_is_refused_counts_as_demand_for_a_moment_though_it_waits_nowhere():
    async def play():
        source = Replicas()
        admission = gate_of(source, max_wait=3.0)
        tasks = [asyncio.create_task(ask(admission, request(f"r{i}"))) for i in range(100)]
        await asyncio.sleep(2.0)
        waits = admission.state()
        for i in range(7):
            assert isinstance(await ask(admission, request(f"late{i}")), tuple)
            await asyncio.sleep(0.1)
        demand = admission.demand()
        assert admission.state().requests <= waits.requests
        assert demand.requests == admission.state().requests + 7
        assert demand.tokens == admission.state().tokens + 7 * (PROMPT + OUTPUT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(4)
        assert admission.demand() == replace(admission.state(), requests=0, tokens=0)

    run_virtually(play())


BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("path", [*BODIES, "grpc"])
async def test_all_ingresses_refuse_alike_and_say_when_to_come_again(path, tmp_path):
    model = served_model(tmp_path)
    source = FakeSource(lambda *_: range(5, 100), hold=1)
    admission = AdmissionQueue(source, lambda: 1, AdmissionConfig(max_waiting=1))
    running = [asyncio.create_task(ask(admission, request(f"r{i}"), OPEN.name)) for i in range(2)]
    await until(lambda: admission.num_waiting == 1)
    if path == "grpc":
        async with serving_grpc(source, model, admission=admission) as served:
            refused = await refusal_of(served.stub.Generate(pb.GenerateRequest(model=MODEL, prompt="hi")))
            assert (refused.status, refused.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
            assert refused.retryable and refused.retry_after >= 1
    else:
        async with client_for(app_for(source, model, admission=admission)) as client:
            refused = await client.post(path, json={"model": MODEL} | BODIES[path])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_a_tenant_that_comes_anew_is_not_refused_for_the_queue_of_another():
    async def play():
        source = Replicas()
        admission = gate_of(source, max_wait=3.0)
        greedy = [asyncio.create_task(ask(admission, request(f"g{i}"), "greedy")) for i in range(200)]
        await asyncio.sleep(2.0)
        assert isinstance(await ask(admission, request("late"), "greedy"), tuple)
        assert await ask(admission, request("meek"), "meek") < 1.5
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)

    run_virtually(play())


def test_a_request_that_cannot_start_before_its_deadline_is_refused_at_once():
    async def play():
        source = Replicas()
        admission = gate_of(source)
        tasks = [asyncio.create_task(ask(admission, request(f"r{i}"))) for i in range(100)]
        await asyncio.sleep(2.0)
        hurried = replace(request("hurried"), deadline=asyncio.get_running_loop().time() + 2.0)
        error, seconds = await ask(admission, hurried)
        assert (error.code, seconds) == ("deadline_exceeded", 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(play())


# --- room in tokens


def test_tokens_bound_what_is_inside_and_a_large_request_is_not_passed_over():
    async def play():
        source = Replicas()
        admission = gate_of(source, bound=100, tokens=3 * (PROMPT + OUTPUT))
        tasks = [asyncio.create_task(ask(admission, request(f"r{i}"))) for i in range(5)]
        await asyncio.sleep(STEP / 2)
        assert (admission.num_inside, admission.tokens_inside) == (3, 3 * (PROMPT + OUTPUT))
        huge = asyncio.create_task(ask(admission, request("huge", prompt=10_000)))
        await asyncio.gather(*tasks, huge)
        assert source.started[-1] == "huge"
        assert admission.tokens_inside == 0

    run_virtually(play())


def test_what_is_found_in_a_prefix_cache_takes_up_no_room():
    async def play():
        source = Replicas(cached=PROMPT)
        admission = gate_of(source, bound=100, tokens=PROMPT + OUTPUT)
        tasks = [asyncio.create_task(ask(admission, request(f"r{i}"))) for i in range(4)]
        await asyncio.sleep(2.5 * STEP)
        assert admission.num_inside > 1, "the next one need not wait for the first one's end"
        await asyncio.gather(*tasks)
        assert (admission.num_inside, admission.tokens_inside) == (0, 0)

    run_virtually(play())


def test_the_room_is_that_of_the_replicas_and_of_one_where_there_is_none():
    now, ended = [0.0], [0]
    ready = [ReplicaCapacity(2, 6000)]
    room = InflightBounds(InflightConfig(64, 512), lambda: ready[0], lambda: ended[0], lambda: now[0], lambda: 2)
    assert (room.sequences(), room.tokens()) == (64 + 8, (6000 + 1024) // 2)
    now[0], ended[0] = 1.0, 300
    assert room.sequences() == 64 + 30, "what ends within a tenth of a second is there before it is missed"
    now[0], ready[0] = 2.0, ReplicaCapacity(1, 3000)
    assert (room.sequences(), room.tokens()) == (32 + 4, (3000 + 512) // 2)
    now[0], ready[0] = 3.0, None
    assert (room.sequences(), room.tokens()) == (32 + 4, (3000 + 512) // 2), "as many as one of them will take"
    for present in (ReplicaCapacity(2, 6000), None):
        fixed = InflightBounds(InflightConfig(64, 512, 7, 99), lambda present=present: present, lambda: 0)
        assert (fixed.sequences(), fixed.tokens()) == (7, 99)


def test_the_room_of_a_router_that_died_is_that_of_those_that_live_until_it_is_back():
    async def play():
        living = [2]
        config = parse_config({"model": "demo", "routers": 2, "max_num_seqs": SLOTS})
        async with SimulatedCluster(2, SimulatedModel(max_num_seqs=SLOTS)) as cluster:
            admission = admission_queue(config, cluster.routers[0], routers=lambda: living[0])
            params = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0.0)
            requests = [Request(f"r{i}", (1 + i,) * PROMPT, params) for i in range(60)]
            tasks = [asyncio.create_task(ask(admission, one)) for one in requests]
            await asyncio.sleep(1.0)
            shares = [admission.num_inside]
            living[0] = 1
            await asyncio.sleep(1.0)
            shares.append(admission.num_inside)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert shares[0] == SLOTS + 2, "half of two replicas, and a little more"
        assert shares[1] == 2 * (SLOTS + 1)

    run_virtually(play())


@pytest.mark.parametrize("pending", [4096, 8], ids=["whole", "cut off"])
async def test_a_client_that_takes_nothing_keeps_no_place_from_others_once_the_replicas_are_done(pending):
    config = parse_config({"model": "demo", "max_inflight": 1})
    async with Lab(DispatcherConfig(max_pending_tokens=pending)) as lab:
        await lab.start("a", pace=0.001)
        admission = admission_queue(config, lab.dispatcher)
        slow = admission.generate("slow", engine_request("slow", 5, max_tokens=40, ignore_eos=True))
        await anext(slow)
        assert admission.num_inside == 1
        assert isinstance(await ask(admission, engine_request("other", 5, max_tokens=8, ignore_eos=True)), float)
        assert lab.dispatcher.num_live == 1, "what the slow one has not taken waits for it"
        await slow.aclose()
        assert (admission.num_inside, admission.tokens_inside) == (0, 0)


async def test_a_dispatcher_tells_the_room_and_the_work_of_its_replicas():
    async with Lab() as lab:
        assert lab.dispatcher.room() is None
        await lab.start("a", num_blocks=65)
        await lab.start("b", num_blocks=33)
        assert lab.dispatcher.room() == ReplicaCapacity(2, 4 * (64 + 32))
        await lab.collect(engine_request("r", 5, max_tokens=8, ignore_eos=True))
        await lab.collect(replace(engine_request("p", 7, max_tokens=1), pooling="last"))
        counters = lab.dispatcher.counters
        assert (counters.prefilled, counters.tokens) == (5 + 7, 8)


# --- figures


@given(st.lists(st.floats(0.02, 2), min_size=30, max_size=60), st.integers(100, 10_000))
def test_a_steady_rate_is_measured_as_it_is_whenever_it_is_looked_at(gaps, rate):
    drain, now = DrainRate(), 100.0
    drain.note(0, now, waiting=True)
    for gap in gaps:
        now += gap
        drain.note(round(rate * (now - 100.0)), now, waiting=True)
    assert drain.per_second == pytest.approx(rate, rel=0.05)


def test_time_in_which_nobody_waits_counts_for_nothing():
    drain = DrainRate()
    drain.note(0, 0.0, waiting=True)
    drain.note(1000, 1.0, waiting=False)
    drain.note(1010, 500.0, waiting=True)
    drain.note(1510, 500.5, waiting=True)
    assert drain.per_second == pytest.approx(1000, rel=0.01)
    assert drain.seconds_for(3000) == pytest.approx(3.0, rel=0.01)
    assert DrainRate().seconds_for(10) is None


def test_a_moment_in_which_little_was_done_foretells_no_long_wait():
    drain = DrainRate()
    drain.note(0, 0.0, waiting=True)
    drain.note(1, 0.4, waiting=True)  # 2.5 tokens a second, while a long prompt was computed, say
    assert drain.foretold(2) == drain.seconds_for(2) == pytest.approx(0.8)
    assert drain.foretold(10_000) == pytest.approx(8.0)
    assert drain.seconds_for(10_000) == pytest.approx(4000)
    drain.note(10, 4.0, waiting=True)
    assert drain.foretold(10_000) == pytest.approx(80.0)


def test_answers_that_are_shorter_than_allowed_are_expected_to_be():
    lengths = OutputLength()
    assert lengths.of(request("r", output=10), 3) == 30
    for _ in range(200):
        lengths.seen(12)
    assert lengths.of(request("r", output=4096), 2) == pytest.approx(24, abs=2)
    assert lengths.of(replace(request("r"), pooling="last"), 1) == 0


async def test_what_ends_without_a_token_says_nothing_of_how_long_answers_are():
    admission = AdmissionQueue(Replicas(), lambda: 1)
    expected = admission._lengths.of(request("r", output=4096), 1)
    for _ in range(200):
        admission.charge("t", 0)
    assert admission._lengths.of(request("r", output=4096), 1) == expected
    admission.charge("t", 1)
    assert admission._lengths.of(request("r", output=4096), 1) < expected


# --- priorities


def test_within_a_tenant_the_urgent_go_first_and_across_tenants_nothing_changes():
    queue = FairQueue()
    for i, priority in enumerate([5, 0, -3, 0, 5]):
        queue.push("a", ("a", i), 10, priority)
        queue.push("b", ("b", i), 10)
    order = [queue.pop() for _ in range(10)]
    assert [i for tenant, i in order if tenant == "a"] == [2, 1, 3, 0, 4]
    assert [i for tenant, i in order if tenant == "b"] == [0, 1, 2, 3, 4]
    assert [tenant for tenant, _ in order] == ["a", "b"] * 5


def test_work_ahead_counts_the_own_line_and_a_fair_share_of_the_others():
    queue = FairQueue()
    for i in range(4):
        queue.push("a", ("a", i), 1, priority=i % 2, work=100)
        queue.push("b", ("b", i), 1, work=1000)
    assert queue.work == 4400
    assert queue.work_ahead("a", 1, 50) == 400 + 450
    assert queue.work_ahead("a", 0, 50) == 200 + 250
    assert queue.work_ahead("c", 0, 50) == 50 + 50
    queue.remove("a", ("a", 0))
    assert queue.work_ahead("a", 0, 0) == 100 + 100


class PlainQueue(list):
    """What waits, (tenant, number, priority, work); a queue's figures are looked up among all of it."""

    def of(self, tenant):
        return sorted((one for one in self if one[0] == tenant), key=lambda one: (one[2], one[1]))

    def work_ahead(self, tenant, priority, work):
        own = sum(one[3] for one in self.of(tenant) if one[2] <= priority)
        others = [sum(one[3] for one in self.of(name)) for name in "abc" if name != tenant]
        return own + sum(min(other, own + work) for other in others)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.integers(0, 99), st.integers(0, 3))))
def test_figures_are_those_of_all_that_waits_whatever_comes_and_goes_with_whichever_priority(changes):
    queue, plain = FairQueue(), PlainQueue()
    for number, (tenant, priority, work, change) in enumerate(changes):
        if change == 0 and plain:
            served = queue.pop()
            assert served == plain.of(served[0])[0]
            plain.remove(served)
        elif change == 1 and plain:
            gone = plain[work % len(plain)]
            queue.remove(gone[0], gone, gone[2])
            plain.remove(gone)
        else:
            plain.append((tenant, number, priority, work))
            queue.push(tenant, plain[-1], 1 + work, priority, work)
        assert (len(queue), queue.work) == (len(plain), sum(one[3] for one in plain))
        assert queue.oldest() == (plain[0] if plain else None)
        assert queue.work_ahead(tenant, priority, 7) == plain.work_ahead(tenant, priority, 7)
        if plain.of(tenant):
            assert queue.last(tenant)[1] == plain.of(tenant)[-1]


def test_a_full_line_gives_up_its_least_urgent_for_a_more_urgent_one():
    async def play():
        source = Replicas()
        admission = gate_of(source, bound=1, max_waiting=3)
        names = [("runs", 0), ("a", 5), ("b", 9), ("c", 9)]
        tasks = {name: asyncio.create_task(ask(admission, request(name, priority=p))) for name, p in names}
        await asyncio.sleep(STEP)
        tasks["urgent"] = asyncio.create_task(ask(admission, request("urgent", priority=1)))
        error, _ = await tasks.pop("c")
        assert (error.status, "more urgent" in error.message) == (429, True)
        error, _ = await ask(admission, request("late", priority=9))
        assert "wait already" in error.message
        assert admission.shed == {"t": 2}
        await asyncio.gather(*tasks.values())
        assert source.started == ["runs", "urgent", "a", "b"]
        assert (admission.num_inside, admission.num_waiting) == (0, 0)

    run_virtually(play())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 2), st.integers(1, 60)), max_size=40))
def test_whatever_comes_each_ends_once_and_nothing_is_left(arrivals):
    async def play():
        source = Replicas()
        admission = gate_of(source, bound=3, tokens=200, max_waiting=5, target_ttft=1.5)
        tasks = []
        for i, (tenant, priority, prompt) in enumerate(arrivals):
            one = request(str(i), prompt, 1 + prompt % 7, priority)
            tasks.append(asyncio.create_task(ask(admission, one, tenant)))
            await asyncio.sleep(0.01)
        ends = Counter(type(one) for one in await asyncio.gather(*tasks))
        assert ends.total() == len(arrivals)
        assert (admission.num_inside, admission.tokens_inside, admission.num_waiting, admission.state().tokens) == (
            0,
            0,
            0,
            0,
        )

    run_virtually(play())


def test_bounds_that_cannot_be_are_refused_by_name():
    with pytest.raises(ConfigError, match="target_ttft"):
        AdmissionConfig(target_ttft=0.0)


@pytest.mark.parametrize(("tenant", "asked", "given"), [("a", -5, 0), ("a", 5, 5), (OPEN.name, -5, -5)])
async def test_no_tenant_is_more_urgent_than_others_in_a_replica(tenant, asked, given):
    """The replica's scheduler knows no tenants: what it gets can order a tenant's own requests alone."""
    source = FakeSource(lambda *_: (5,), eos=5)
    admission = AdmissionQueue(source, lambda: UNBOUNDED)
    async with aclosing(admission.generate(tenant, request("x", priority=asked))) as chunks:
        await anext(chunks)
    assert [one.priority for one in source.requests] == [given]
