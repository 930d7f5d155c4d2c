"""The time that a grammar takes is told: in the queue's phase, in `squadron why`, and in a trace."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from cluster.accounts.flight_recorder import Wait
from cluster.replica.core import ReplicaCore
from cluster.replica.sessions import ReplicaFacts, ReplicaTimes
from cluster.wire.link import RouterLink
from cluster.wire.parts import TraceContext
from cluster.wire.replica_messages import Rejected
from cluster.wire.router_messages import Abort
from cluster.wire.translation import submit_message
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from tests.cluster.cluster_lab import until
from tests.cluster.replica.test_grammar_replica import Grammars, outcome, structured
from tests.cluster.telemetry.tracing_lab import TRACEPARENT, Spans
from tests.engine.engine_driver import EOS, VOCAB, Driver, request
from tests.fake_executor import FakeExecutor
from tests.simulator.links import connect_local

SLOW = 0.2  # seconds that a grammar takes


class Lab:
    """A replica whose grammars are compiled when the test says so, and that traces."""

    def __init__(self) -> None:
        config = EngineConfig("fake", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, block_size=4)
        core = EngineCore(config, FakeExecutor(64, 4, VOCAB), (EOS,), VOCAB, 64)
        facts = ReplicaFacts("a", "fake", 128, VOCAB, 4, 63, (EOS,))
        self.grammars, self.spans = Grammars(), Spans()
        times = ReplicaTimes(heartbeat=60.0)
        self.replica = ReplicaCore(core, facts, times, grammars=self.grammars, spans=self.spans.engine("a"))

    async def asked(self, n: int = 1) -> RouterLink:
        """Send a request with structured output and wait until its grammar is asked for."""
        link = await connect_local(self.replica.serve, "router")
        link.send(submit_message(structured(n=n), 10, trace=TraceContext(TRACEPARENT)))
        await until(lambda: self.grammars.asked)
        return link

    def sums(self) -> dict[str, float]:
        """The sums of the figures of requests, by what they are of."""
        found = [sample for family in self.replica.metrics.collect(0) for sample in family.samples]
        ending = "_time_seconds_sum"
        return {
            one.name.removeprefix("squadron_request_").removesuffix(ending): one.value
            for one in found
            if one.name.endswith(ending)
        }

    def waits(self) -> list[Wait]:
        return [event.what for event in self.replica.flight.of("s")]


@pytest.fixture
async def lab():
    one = Lab()
    yield one
    await one.replica.close()


async def test_phases_are_all_of_the_time_in_the_replica_the_grammars_included(lab) -> None:
    began = time.monotonic()
    link = await lab.asked()
    await asyncio.sleep(SLOW)
    lab.grammars.answer()
    _, reasons = await outcome(link, [10])
    took = time.monotonic() - began
    assert reasons == {10: "stop"}
    sums = lab.sums()
    assert SLOW <= sums["grammar"] <= sums["queue"]
    assert SLOW < sums["queue"] + sums["prefill"] + sums["decode"] <= took
    assert sums["inference"] < took - SLOW


async def test_choices_have_all_the_phases_and_the_grammar_counts_once(lab) -> None:
    began = time.monotonic()
    link = await lab.asked(n=3)
    await asyncio.sleep(SLOW)
    lab.grammars.answer()
    await outcome(link, [10, 11, 12])
    took = time.monotonic() - began
    sums = lab.sums()
    assert sums["queue"] >= 3 * SLOW
    assert SLOW <= sums["grammar"] <= took


async def test_why_tells_of_the_wait_while_it_lasts_and_of_its_end(lab) -> None:
    link = await lab.asked()
    assert lab.waits() == [Wait.GRAMMAR]
    await asyncio.sleep(SLOW)
    answered = lab.replica.flight.clock()
    lab.grammars.answer()
    await outcome(link, [10])
    await until(lambda: Wait.ENDED in lab.waits())
    assert lab.waits() == [Wait.GRAMMAR, Wait.QUEUE, Wait.RUNS, Wait.ENDED]
    compiling, queued, runs, _ = lab.replica.flight.of("s")
    assert answered - compiling.at >= SLOW
    assert answered <= queued.at <= runs.at


async def test_why_tells_of_a_grammar_that_is_refused(lab) -> None:
    link = await lab.asked()
    lab.grammars.asked[0][2].set_exception(InvalidRequestError("no", "structured", "not_supported"))
    assert isinstance(await outcome(link, [10]), Rejected)
    assert [(one.what, one.detail) for one in lab.replica.flight.of("s")][1:] == [(Wait.ENDED, "not_supported")]


async def test_why_tells_of_a_client_that_left_meanwhile(lab) -> None:
    link = await lab.asked()
    link.send(Abort(10))
    await until(lambda: lab.replica.num_requests == 0)
    lab.grammars.answer()
    await until(lambda: Wait.ENDED in lab.waits())
    assert lab.waits() == [Wait.GRAMMAR, Wait.ENDED]
    assert lab.sums()["grammar"] == 0.0


async def test_nothing_is_noted_of_a_grammar_that_is_there_already(lab, monkeypatch) -> None:
    wait_for = lab.grammars.submit

    def kept(*args):
        future = wait_for(*args)
        lab.grammars.answer()
        return future

    monkeypatch.setattr(lab.grammars, "submit", kept)
    link = await lab.asked()
    await outcome(link, [10])
    assert lab.waits() == []


async def test_a_trace_has_the_grammar_before_the_queue_without_a_gap(lab) -> None:
    link = await lab.asked()
    await asyncio.sleep(SLOW)
    lab.grammars.answer()
    await outcome(link, [10])
    await until(lambda: len(lab.spans.all()) == 4)
    phases = [lab.spans.one(name) for name in ("grammar", "queue", "prefill", "decode")]
    assert phases[0].end_time - phases[0].start_time >= SLOW * 1e9
    assert phases[1].end_time - phases[1].start_time < SLOW * 1e9
    assert [one.end_time for one in phases[:-1]] == [one.start_time for one in phases[1:]]


def test_the_queue_is_no_older_for_a_grammar() -> None:
    """Its age says how long sequences have waited for the engine, and a grammar is none of its doing."""
    driver = Driver(max_num_seqs=1)
    driver.core.add(request("a", 4, ignore_eos=True))
    driver.step()
    added = driver.now
    driver.core.add(replace(request("compiled", 4), arrival_time=added - 8.0))
    assert driver.core.stats().waits_since == added
    driver.drain()
    phases = driver.finished["compiled", 0].sequence.phases
    assert phases is not None
    assert phases.queue > 8.0
