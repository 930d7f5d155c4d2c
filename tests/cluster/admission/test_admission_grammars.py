"""Requests that wait for the grammar compiler stand outside the bounds of what is let in, and few at a time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.admission.fair_queue import FairQueue
from cluster.errors import ApiError
from cluster.token_source import NO_CONTEXT, TokenChunk
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.cluster.cluster_lab import Lab, until
from tests.cluster.replica.test_grammar_replica import Grammars, structured
from tests.simulator.virtual_time import run_virtually

BOUND, STEP = 4, 0.05
ASIDE = 4  # of one tenant at a bound so small


def plain(name: str, n: int = 1) -> Request:
    return Request(name, (1,) * 8, SamplingParams(n=n, max_tokens=4, temperature=1.0))


def with_grammar(name: str, n: int = 1) -> Request:
    wanted = StructuredOutput("regex", "[a-z]{64}")
    return Request(name, (1,) * 8, SamplingParams(n=n, max_tokens=4, temperature=1.0, structured=wanted))


@dataclass
class Replicas:
    """Implements `TokenSource`: what has a grammar begins once that is compiled, everything else at once."""

    compiled: asyncio.Event = field(default_factory=asyncio.Event)
    compiling: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    most_compiling: int = 0
    most_running: int = 0
    work: int = 0

    async def generate(self, one, context=NO_CONTEXT):
        if one.params.structured is not None:
            self.compiling.add(one.request_id)
            self.most_compiling = max(self.most_compiling, len(self.compiling))
            try:
                await self.compiled.wait()
            finally:
                self.compiling.discard(one.request_id)
        context.on_begin()
        self.running.add(one.request_id)
        self.most_running = max(self.most_running, len(self.running))
        try:
            for token in range(one.params.max_tokens):
                await asyncio.sleep(STEP)
                self.work += 3
                yield TokenChunk(0, (token,), (), "length" if token == 3 else None)
        finally:
            self.running.discard(one.request_id)
            context.on_end()

    def finish_choice(self, request_id, choice):
        raise AssertionError("not expected")


async def run(admission, one, tenant):
    """Return the seconds that a request took, or the code of its error."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with aclosing(admission.generate(tenant, one)) as chunks:
            async for _ in chunks:
                pass
    except ApiError as error:
        return error.code
    return loop.time() - began


def gate_of(source, bound=BOUND, **config):
    return AdmissionQueue(source, lambda: bound, AdmissionConfig(**config), work_done=lambda: source.work)


def test_grammars_that_are_compiled_for_long_keep_nobody_else_out():
    async def play():
        source = Replicas()
        admission = gate_of(source, max_wait=5.0)
        slow = [asyncio.create_task(run(admission, with_grammar(f"s{i}"), "slow")) for i in range(50)]
        await asyncio.sleep(1.0)
        assert (admission.num_inside, admission.tokens_inside) == (0, 0)
        took = [await run(admission, plain(f"p{i}"), tenant) for i in range(40) for tenant in ("other", "slow")]
        assert max(took) < 0.3, "as with nobody else there"
        herd = await asyncio.gather(*(run(admission, plain(f"h{i}"), "other") for i in range(2 * BOUND)))
        assert max(herd) < 0.6, "two turns"
        assert (source.most_running, source.most_compiling) == (BOUND, ASIDE)
        source.compiled.set()
        assert {type(one) for one in await asyncio.gather(*slow)} <= {float, str}
        assert (admission.num_inside, admission.tokens_inside, admission.num_waiting) == (0, 0, 0)

    run_virtually(play())


def test_those_whose_grammars_are_there_take_up_room_and_go_over_the_bound_by_few():
    async def play():
        source = Replicas()
        source.compiled.set()
        admission = gate_of(source)
        both = [
            asyncio.create_task(run(admission, make(f"{make.__name__}{i}"), "t"))
            for i in range(30)
            for make in (plain, with_grammar)
        ]
        took = await asyncio.gather(*both)
        assert all(isinstance(one, float) for one in took)
        assert BOUND <= source.most_running <= BOUND + ASIDE
        assert max(took) < 60 / BOUND * 4 * STEP * 1.3, "no replica was left without work"
        assert (admission.num_inside, admission.tokens_inside, admission.num_waiting) == (0, 0, 0)

    run_virtually(play())


def test_each_tenant_may_have_its_own_compiled_and_no_more_at_a_time():
    async def play():
        source = Replicas()
        admission = gate_of(source, bound=32)
        greedy = [asyncio.create_task(run(admission, with_grammar(f"g{i}"), "greedy")) for i in range(20)]
        await asyncio.sleep(0)
        meek = asyncio.create_task(run(admission, with_grammar("meek"), "meek"))
        await asyncio.sleep(0.1)
        assert source.compiling == {"g0", "g1", "g2", "g3", "meek"}
        assert admission.waiting() == {"greedy": 16}
        greedy[0].cancel()
        await asyncio.sleep(0.1)
        assert source.compiling == {"g1", "g2", "g3", "g4", "meek"}
        for one in (*greedy, meek):
            one.cancel()
        await asyncio.gather(*greedy, meek, return_exceptions=True)
        assert (admission.num_inside, admission.num_waiting) == (0, 0)

    run_virtually(play())


async def test_a_request_takes_up_its_room_once_a_replica_has_begun_it():
    grammars = Grammars()
    async with Lab() as lab:
        await lab.start("a", grammars=grammars, steps=0)
        admission = AdmissionQueue(lab.dispatcher, lambda: 1)
        task = asyncio.create_task(run(admission, structured(n=2), "tenant"))
        await until(lambda: grammars.asked)
        assert admission.num_inside == 0
        grammars.answer()
        await until(lambda: admission.num_inside == 2)
        lab.alive["a"].executor.allow(10**6)
        assert isinstance(await task, float)
        assert (admission.num_inside, admission.tokens_inside) == (0, 0)


def test_thousands_that_wait_for_a_compiler_cost_others_nothing():
    """Every request that came or went asked each of them anew whether it may go: 30 ms of the event loop."""
    queue, asked = FairQueue(), []
    for number in range(4096):
        queue.push("greedy", ("greedy", number), 1, number % 100, kind="compiles")

    def may(item):
        asked.append(item)
        return item[0] == "meek"

    assert queue.pop_of(may) is None
    queue.push("meek", ("meek", 0), 1)
    assert queue.pop_of(may) == ("meek", 0)
    assert len(asked) <= 3
    queue.push("greedy", ("greedy", "plain"), 1, 50, kind="plain")
    assert queue.pop_of(lambda item: item[1] == "plain") == ("greedy", "plain")
    assert len(queue) == 4096


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.booleans()), max_size=30), st.data())
def test_who_may_not_go_is_passed_by_and_keeps_its_place(items, data):
    queue = FairQueue()
    for number, (tenant, priority, may) in enumerate(items):
        queue.push(tenant, (tenant, number, may), data.draw(st.integers(1, 9)), priority, kind=may)
    first = []
    while (item := queue.pop_of(lambda one: one[2])) is not None:
        first.append(item)
    assert sorted(first) == sorted((tenant, n, may) for n, (tenant, _, may) in enumerate(items) if may)
    rest = [queue.pop() for _ in range(len(queue))]
    for tenant in "ab":
        for some in (first, rest):
            own = [(items[n][1], n) for name, n, _ in some if name == tenant]
            assert own == sorted(own), "by priority, then in order of arrival"
