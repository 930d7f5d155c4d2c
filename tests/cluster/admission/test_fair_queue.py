"""Turns: no tenant starves another, nothing is held back needlessly, and nothing is left behind."""

import asyncio
from collections import Counter, defaultdict
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.admission.fair_queue import FairQueue
from cluster.admission.keys import Tenant
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.token_source import TokenChunk
from engine.request import Request
from engine.sampling_params import SamplingParams

COSTS = st.integers(1, 100_000)


class ManualSource:
    """Streams that end when the test says so, one chunk at a time."""

    def __init__(self):
        self.started = []
        self.closed = []
        self.queues = defaultdict(asyncio.Event)
        self.finished_choices = []

    async def generate(self, request, context=None):
        self.started.append(request.request_id)
        try:
            await self.queues[request.request_id].wait()
            yield TokenChunk(0, (1,), (), "stop")
        finally:
            self.closed.append(request.request_id)

    def finish_choice(self, request_id, choice):
        self.finished_choices.append((request_id, choice))


def request(name, prompt=10, n=1):
    return Request(name, (1,) * prompt, SamplingParams(n=n, temperature=1.0))


async def run(admission, tenant, one):
    async with aclosing(admission.generate(tenant, one)) as chunks:
        return [chunk async for chunk in chunks]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def start(admission, tenant, one):
    return asyncio.create_task(run(admission, tenant, one))


# --- the queue


@given(st.lists(COSTS, min_size=1, max_size=200), COSTS, st.integers(0, 50))
def test_one_who_comes_anew_is_behind_at_most_one_turn_of_another(backlog, cost, served):
    queue = FairQueue()
    for i, one in enumerate(backlog):
        queue.push("greedy", ("greedy", i), one)
    for _ in range(min(served, len(backlog) - 1)):
        queue.pop()
    queue.push("meek", ("meek", 0), cost)
    first_two = [queue.pop()[0] for _ in range(min(2, len(queue)))]
    assert "meek" in first_two


@given(st.lists(st.lists(COSTS, min_size=1, max_size=30), min_size=2, max_size=6), COSTS)
def test_one_turn_of_each_of_many_at_most(backlogs, cost):
    queue = FairQueue()
    for tenant, costs in enumerate(backlogs):
        for i, one in enumerate(costs):
            queue.push(f"t{tenant}", (tenant, i), one)
    queue.pop()
    queue.push("meek", ("meek", 0), cost)
    before = []
    while (item := queue.pop())[0] != "meek":
        before.append(item[0])
    assert max(Counter(before).values(), default=0) <= 1


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=10, max_size=100))
def test_tenants_that_always_wait_get_the_same_tokens_give_or_take_one_turn(costs):
    queue, got = FairQueue(), Counter()
    for i, (a, b) in enumerate(costs):
        queue.push("a", ("a", i, a), a)
        queue.push("b", ("b", i, b), b)
    largest = max(max(pair) for pair in costs)
    while queue.length("a") and queue.length("b"):
        tenant, _, cost = queue.pop()
        got[tenant] += cost
        assert abs(got["a"] - got["b"]) <= 2 * largest


def test_what_was_generated_counts_as_well():
    queue, turns = FairQueue(), Counter()
    for i in range(1000):
        queue.push("long", ("long", i), 10)
        queue.push("short", ("short", i), 10)
    for _ in range(550):
        tenant, _ = queue.pop()
        turns[tenant] += 1
        queue.charge(tenant, 990 if tenant == "long" else 90)
    assert 45 <= turns["long"] <= 55, "a turn of 1,000 tokens is worth ten of 100"


def test_who_was_away_has_saved_nothing_up():
    queue = FairQueue()
    for i in range(100):
        queue.push("steady", ("steady", i), 10)
    for _ in range(50):
        queue.pop()
    for i in range(50):
        queue.push("new", ("new", i), 10)
    assert Counter(queue.pop()[0] for _ in range(20)) == {"steady": 10, "new": 10}


class QueueMachine(RuleBasedStateMachine):
    """Any order of coming, leaving and being served: order within a tenant, and nothing left behind."""

    def __init__(self):
        super().__init__()
        self.queue = FairQueue()
        self.lines = defaultdict(list)
        self.number = 0

    @rule(tenant=st.sampled_from("abcd"), cost=st.integers(1, 1000))
    def push(self, tenant, cost):
        self.number += 1
        self.queue.push(tenant, (tenant, self.number), cost)
        self.lines[tenant].append((tenant, self.number))

    @precondition(lambda self: any(self.lines.values()))
    @rule()
    def pop(self):
        item = self.queue.pop()
        assert self.lines[item[0]].pop(0) == item

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from([item for line in self.lines.values() for item in line]))
        self.queue.remove(item[0], item)
        self.lines[item[0]].remove(item)

    @rule(tenant=st.sampled_from("abcd"), tokens=st.integers(0, 5000))
    def charge(self, tenant, tokens):
        self.queue.charge(tenant, tokens)

    @invariant()
    def counts_agree(self):
        waiting = {tenant: len(line) for tenant, line in self.lines.items() if line}
        assert self.queue.lengths() == waiting
        assert len(self.queue) == sum(waiting.values())
        if not waiting:
            with pytest.raises(IndexError):
                self.queue.pop()


TestQueueMachine = QueueMachine.TestCase


def test_nobody_is_forgotten_while_somebody_waits():
    queue = FairQueue()
    queue.push("a", "x", 1)
    with pytest.raises(ValueError, match="1 items wait"):
        queue.forget()


# --- the admission queue


async def test_a_thousand_waiting_requests_delay_one_of_another_tenant_by_one_turn():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1)
    greedy = [start(admission, "greedy", request(f"g{i}")) for i in range(1000)]
    await settle()
    meek = start(admission, "meek", request("meek", prompt=500))
    await settle()
    assert source.started == ["g0"]
    for _ in range(2):
        source.queues[source.started[-1]].set()
        await settle()
    assert source.started.index("meek") <= 2
    for one in (*greedy, meek):
        one.cancel()
    await asyncio.gather(*greedy, meek, return_exceptions=True)
    assert (admission.num_inside, admission.num_waiting, admission.waiting()) == (0, 0, {})


async def test_nobody_waits_while_there_is_room_and_order_within_a_tenant_is_kept():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 3)
    tasks = [start(admission, "ab"[i % 2], request(f"{'ab'[i % 2]}{i}")) for i in range(12)]
    for served in range(13):
        await settle()
        assert admission.num_inside == min(3, 12 - served), "work is conserved"
        assert len(source.started) == min(12, served + 3)
        if served < 12:
            source.queues[source.started[served]].set()
    await asyncio.gather(*tasks)
    for tenant in "ab":
        mine = [name for name in source.started if name[0] == tenant]
        assert mine == sorted(mine, key=lambda name: int(name[1:]))
    assert sorted(source.closed) == sorted(source.started)


async def test_sequences_are_what_is_counted_and_a_large_request_is_not_passed_over():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 4)
    tasks = [start(admission, "a", request("large", n=16)), start(admission, "a", request("next"))]
    await settle()
    assert (source.started, admission.num_inside) == (["large"], 16)
    source.queues["large"].set()
    source.queues["next"].set()
    await asyncio.gather(*tasks)
    assert admission.num_inside == 0


async def test_a_waiting_request_that_is_given_up_leaves_nothing():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1)
    first, second, third = (start(admission, "a", request(name)) for name in ("1", "2", "3"))
    await settle()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert admission.waiting() == {"a": 1}
    source.queues["1"].set()
    source.queues["3"].set()
    await asyncio.gather(first, third)
    assert source.started == ["1", "3"]
    assert (admission.num_inside, admission.num_waiting) == (0, 0)


async def test_a_request_that_is_given_up_in_the_moment_of_its_turn_gives_it_on():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1)
    first, second, third = (start(admission, "a", request(name)) for name in ("1", "2", "3"))
    await settle()
    first.add_done_callback(lambda _: second.cancel())
    source.queues["1"].set()
    source.queues["2"].set()
    source.queues["3"].set()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert source.started[-1] == "3"
    assert (admission.num_inside, admission.num_waiting) == (0, 0)


async def test_an_error_of_the_source_frees_the_place():
    class Failing(ManualSource):
        async def generate(self, request, context=None):
            raise ApiError("no_replica", "none")
            yield

    admission = AdmissionQueue(Failing(), lambda: 1)
    for _ in range(3):
        with pytest.raises(ApiError, match="none"):
            await run(admission, "a", request("1"))
    assert admission.num_inside == 0


async def test_a_caller_that_forgets_to_close_does_not_keep_its_place():
    source = ManualSource()
    source.queues["1"].set()
    admission = AdmissionQueue(source, lambda: 1)
    chunks = admission.generate("a", request("1"))
    await anext(chunks)
    assert admission.num_inside == 1
    del chunks
    assert admission.num_inside == 0


async def test_a_full_line_refuses_its_own_tenant_alone():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1, AdmissionConfig(max_waiting=2))
    tasks = [start(admission, "a", request(f"{i}")) for i in range(3)]
    await settle()
    with pytest.raises(ApiError, match="2 requests of this tenant wait already") as refused:
        await run(admission, "a", request("4"))
    assert (refused.value.status, refused.value.code, refused.value.retryable) == (429, "overloaded", True)
    assert 1 <= refused.value.retry_after <= 60
    assert admission.shed == {"a": 1}
    other = start(admission, "b", request("5"))
    await settle()
    assert admission.waiting() == {"a": 2, "b": 1}
    for task in (*tasks, other):
        task.cancel()
    await asyncio.gather(*tasks, other, return_exceptions=True)
    assert (admission.num_inside, admission.num_waiting) == (0, 0)


async def test_who_waits_too_long_is_told_to_come_again():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1, AdmissionConfig(max_wait=0.01))
    first = start(admission, "a", request("1"))
    await settle()
    with pytest.raises(ApiError, match=r"waited 0\.01 s") as refused:
        await run(admission, "a", request("2"))
    assert refused.value.status == 429
    assert (admission.num_inside, admission.num_waiting) == (1, 0)
    source.queues["1"].set()
    await first


async def test_a_bound_that_rises_lets_in_those_who_wait():
    source, bound = ManualSource(), [1]
    admission = AdmissionQueue(source, lambda: bound[0])
    tasks = [start(admission, "a", request(f"{i}")) for i in range(3)]
    await settle()
    bound[0] = 10
    while admission.num_waiting:
        await asyncio.sleep(0.01)
    assert admission.num_inside == 3
    for name in "012":
        source.queues[name].set()
    await asyncio.gather(*tasks)


async def test_nobody_overtakes_those_who_wait_when_the_bound_rises():
    source, bound = ManualSource(), [1]
    admission = AdmissionQueue(source, lambda: bound[0])
    tasks = [start(admission, "a", request(f"{i}")) for i in range(3)]
    await settle()
    bound[0] = 2
    tasks.append(start(admission, "a", request("3")))
    await settle()
    assert source.started == ["0", "1"]
    for name in "0123":
        source.queues[name].set()
    await asyncio.gather(*tasks)
    assert source.started == ["0", "1", "2", "3"]


async def test_who_got_long_answers_waits_longer():
    source = ManualSource()
    tenancy, admission = Tenancy(), AdmissionQueue(source, lambda: 1)
    talker, brief = Tenant("talker"), Tenant("brief")

    async def answer(tenant, name, tokens):
        async with await tenancy.visit(tenant) as visit:
            visit.ask("demo", admission)
            async with aclosing(visit.source.generate(request(name))) as chunks:
                async for _ in chunks:
                    visit.charge_output(tokens)

    jobs = [(talker, f"t{i}", 1000) for i in range(3)] + [(brief, f"b{i}", 10) for i in range(3)]
    tasks = [asyncio.create_task(answer(*job)) for job in jobs]
    await settle()
    for name in ("t0", "t1", "t2", "b0", "b1", "b2"):
        source.queues[name].set()
    await asyncio.gather(*tasks)
    assert source.started == ["t0", "b0", "b1", "b2", "t1", "t2"]


async def test_idle_time_forgives_what_was_used():
    source = ManualSource()
    admission = AdmissionQueue(source, lambda: 1)
    source.queues["1"].set()
    async with aclosing(admission.generate("a", request("1", prompt=1000))) as chunks:
        await anext(chunks)
        admission.charge("a", 10**9)
    tasks = [
        start(admission, "b", request("2")),
        start(admission, "b", request("3")),
        start(admission, "a", request("4")),
    ]
    await settle()
    source.queues["2"].set()
    await settle()
    assert source.started == ["1", "2", "4"]
    for name in ("3", "4"):
        source.queues[name].set()
    await asyncio.gather(*tasks)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=30), st.integers(1, 4))
def test_whatever_comes_and_goes_nothing_is_left(arrivals, bound):
    async def play():
        source = ManualSource()
        admission = AdmissionQueue(source, lambda: bound)
        tasks = []
        for i, (tenant, prompt, gives_up) in enumerate(arrivals):
            task = start(admission, tenant, request(str(i), prompt))
            tasks.append(task)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if gives_up:
                tasks[i // 2].cancel()
            elif source.started:
                source.queues[source.started[-1]].set()
            assert admission.num_inside <= bound
        for i in range(len(arrivals)):
            source.queues[str(i)].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (admission.num_inside, admission.num_waiting) == (0, 0)
        assert sorted(source.closed) == sorted(source.started)

    asyncio.run(play())


@pytest.mark.parametrize("wrong", [{"max_waiting": 0}, {"max_wait": 0.0}])
def test_bounds_that_let_nobody_in_are_refused(wrong):
    from engine.errors import ConfigError

    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdmissionConfig(**wrong)
