"""Steps that overlap: who is told what, who gets nothing, and what a step must wait for."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineDeadError, StepMemoryError
from engine.holds import Hold
from engine.request import FinishReason
from engine.scheduler import Scheduler
from tests.unit.engine_driver import VOCAB, Driver, expected, request
from tests.unit.late_executor import LateExecutor
from tests.unit.test_core import ANYTHING, AllButTheEnd, end_token


def overlapping(executor=None, **changes):
    return Driver(executor=executor, async_scheduling=True, **changes)


def late(**changes):
    return LateExecutor(64, 4, VOCAB, **changes)


# ---- what overlaps -----------------------------------------------------------------------------------------


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known():
    driver = overlapping()
    one = request("a", 3, max_tokens=6, ignore_eos=True)
    driver.core.add(one)
    driver.step()
    assert (len(driver.executor.fed), len(driver.executor.queue)) == (1, 1)
    driver.drain()
    tokens = expected(one)
    assert driver.tokens["a", 0] == tokens
    assert driver.executor.fed == [list(one.prompt_token_ids), *([token] for token in tokens[:-1])]
    stats = driver.core.stats()
    assert (stats.steps_ahead, stats.steps_held) == (5, 0)


@pytest.mark.parametrize(
    ("asked", "device", "overlaps"),
    [(None, None, False), (None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_steps_overlap_on_gpus_unless_it_is_said_otherwise(asked, device, overlaps):
    assert EngineConfig("m", async_scheduling=asked, device=device).overlaps == overlaps


def test_without_overlap_every_step_ends_in_its_own_call():
    driver = Driver(executor=late(), async_scheduling=False)
    driver.core.add(request("a", 3))
    driver.step()
    assert not driver.executor.queue
    assert driver.core.stats().steps_ahead == 0


def test_chunks_of_a_prompt_overlap_and_decodes_join_them():
    driver = overlapping(max_num_batched_tokens=5)
    asked = [request("long", 19, max_tokens=5), request("short", 2, seed=3, temperature=1.0)]
    driver.run(*asked)
    assert [driver.tokens[one.request_id, 0] for one in asked] == [expected(one) for one in asked]
    assert driver.core.stats().steps_held == 0


FREE = {
    "stop ids": {"stop_token_ids": (3, 5)},
    "min_tokens": {"min_tokens": 3},
    "logprobs": {"logprobs": 2},
    "bias": {"logit_bias": {7: -1.0}},
    "allowed": {"allowed_token_ids": tuple(range(1, VOCAB, 2))},
    "bad word of one token": {"bad_words": "x", "bad_words_ids": ((5,),)},
    "seed": {"temperature": 1.0},
}
HELD = {
    Hold.FORKS: {"n": 2},
    Hold.PROMPTS: {"prompt_logprobs": 0},
    Hold.HISTORY: {"presence_penalty": 0.5},
    "bad words": {"bad_words": "x", "bad_words_ids": ((5, 6),)},
    "grammar": {"structured": ANYTHING, "ignore_eos": False},
}


@pytest.mark.parametrize("params", [*FREE.values(), *HELD.values()], ids=[*FREE, *map(str, HELD)])
def test_only_what_needs_a_token_on_the_host_waits_for_it(params, monkeypatch):
    reasons = []
    whole = Scheduler.hold
    monkeypatch.setattr(Scheduler, "hold", lambda self, reason: reasons.append(reason) or whole(self, reason))
    one = request("r", 5, **{"max_tokens": 6, "ignore_eos": True, **params})
    tokens = []
    for driver in (Driver(), overlapping()):
        driver.core.add(one, AllButTheEnd() if one.params.structured else None)
        driver.drain()
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    held = {Hold.FORKS: {Hold.FORKS}, Hold.PROMPTS: {Hold.PROMPTS}}
    name = next((name for name, value in HELD.items() if value is params), None)
    assert set(reasons) == (set() if name is None else held.get(name, {Hold.HISTORY}))
    assert driver.core.stats().steps_held == len(reasons)
    assert driver.core.stats().steps_ahead > 0 or name not in (None, Hold.FORKS, Hold.PROMPTS)


# ---- ends ------------------------------------------------------------------------------------------------------


def test_a_length_is_known_ahead_and_a_stop_costs_one_row_that_nobody_hears_of():
    free = request("a", 6, max_tokens=9, ignore_eos=True)
    driver = overlapping()
    driver.run(free)
    assert sum(map(len, driver.executor.fed)) == 6 + 8
    position, token = end_token(free)
    stopped = replace(free, params=replace(free.params, stop_token_ids=(token,), max_tokens=20))
    driver = overlapping()
    driver.run(stopped)
    assert driver.tokens["a", 0] == expected(free)[: position + 1]
    assert driver.finished["a", 0].sequence.num_output_tokens == position + 1
    assert driver.core.stats().generated_tokens == position + 1
    driver.run(request("next", 2, max_tokens=1))
    assert sum(map(len, driver.executor.fed)) == 6 + position + 1 + 2, "one row too many ran, and no more"


def test_a_length_is_known_ahead_beside_chunks_of_a_prompt():
    driver = overlapping(max_num_batched_tokens=6, max_model_len=24)
    short, long = request("short", 2, max_tokens=4, ignore_eos=True), request("long", 20, max_tokens=4)
    driver.run(short, long)
    assert [driver.tokens[one.request_id, 0] for one in (short, long)] == [expected(short), expected(long)]
    assert sum(map(len, driver.executor.fed)) == 2 + 3 + 20 + len(expected(long)) - 1


def test_who_takes_the_blocks_of_one_that_stopped_is_not_disturbed_by_its_last_row():
    free = request("a", 6, max_tokens=20, ignore_eos=True)
    _, token = end_token(free)
    stopped = replace(free, params=replace(free.params, stop_token_ids=(token,)))
    heirs = [request(f"h{i}", 9, seed=i, temperature=1.0, max_tokens=10, ignore_eos=True) for i in range(4)]
    driver = overlapping(num_blocks=8, max_num_seqs=2, max_model_len=28)
    driver.run(stopped, *heirs)
    assert all(driver.tokens[one.request_id, 0] == expected(one) for one in heirs)


def test_an_abort_in_flight_gives_back_at_once_and_the_heir_of_the_row_gets_its_own_tokens():
    driver = overlapping(max_num_seqs=1)
    driver.core.add(request("gone", 6, max_tokens=20, ignore_eos=True))
    driver.step()
    driver.step()
    assert driver.core.abort("gone")
    stats = driver.core.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    heir = request("heir", (9, 8, 7), max_tokens=5, ignore_eos=True)
    driver.run(heir)
    assert driver.tokens["heir", 0] == expected(heir)
    assert len(driver.tokens["gone", 0]) == 2
    assert driver.finished["gone", 0].sequence.num_output_tokens == 2
    assert driver.reason("gone") is FinishReason.ABORT


def test_one_that_is_aborted_beside_others_leaves_their_logprobs_in_place():
    driver = overlapping()
    asked = [request(f"r{i}", 2 + i, seed=i, temperature=1.0, logprobs=1, ignore_eos=True) for i in range(4)]
    for one in asked:
        driver.core.add(one)
    driver.step()
    driver.core.abort("r1")
    driver.drain()
    for one in (asked[0], *asked[2:]):
        assert driver.tokens[one.request_id, 0] == expected(one)
        assert [entry.token_id for entry in driver.logprobs[one.request_id, 0]] == expected(one)


def test_nothing_is_told_of_the_prompt_of_one_that_left_in_flight(caplog):
    driver = overlapping()
    beside = request("beside", 1, max_tokens=6, ignore_eos=True)
    driver.core.add(beside)
    driver.step()
    driver.core.add(request("scored", 5, prompt_logprobs=0))
    driver.core.add(replace(request("pooled", 5, max_tokens=1), pooling="mean"))
    driver.step()
    assert {one.request.request_id for one in driver.core._flying.schedule.sequences} == {
        "beside",
        "scored",
        "pooled",
    }
    driver.core.abort("scored")
    driver.core.abort("pooled")
    report = driver.step()
    assert (report.prompt_logprobs, report.pooled) == ([], [])
    driver.drain()
    assert driver.tokens["beside", 0] == expected(beside)
    assert {finish.reason for finish in driver.finished.values()} == {FinishReason.ABORT, FinishReason.LENGTH}
    assert not caplog.records


def test_a_choice_whose_first_token_is_in_flight_cannot_be_ended_alone():
    driver = overlapping(max_num_batched_tokens=4)
    driver.core.add(request("a", 6, max_tokens=9, ignore_eos=True))
    driver.step()  # the rest of the prompt is in flight, and its token
    assert not driver.core.finish_choice("a", 0)
    driver.step()
    assert driver.core.finish_choice("a", 0)
    driver.drain()
    assert len(driver.tokens["a", 0]) == 1
    assert driver.finished["a", 0].sequence.num_output_tokens == 1


def test_a_deadline_that_passes_in_flight_ends_with_the_tokens_that_were_told():
    driver = overlapping()
    driver.core.add(replace(request("a", 3, max_tokens=30, ignore_eos=True), deadline=3.5))
    driver.drain()
    finish = driver.finished["a", 0]
    assert finish.code == "deadline_exceeded"
    assert finish.sequence.num_output_tokens == len(driver.tokens["a", 0]) == 3


def test_a_log_goes_on_where_it_ended():
    one = request("a", 5, max_tokens=9, seed=2, temperature=1.0, ignore_eos=True)
    log = tuple(expected(one)[:4])
    driver = overlapping()
    driver.run(replace(one, resume={0: log}))
    assert driver.tokens["a", 0] == expected(one)[4:]


def test_nobody_is_preempted_while_a_step_runs():
    driver = overlapping(num_blocks=10, max_num_seqs=4, max_model_len=32)
    asked = [request(f"r{i}", 3 + i, seed=i, temperature=1.0, max_tokens=20, ignore_eos=True) for i in range(4)]
    driver.run(*asked)
    stats = driver.core.stats()
    assert stats.preemptions > 0
    assert stats.steps_held >= stats.preemptions
    assert all(driver.tokens[one.request_id, 0] == expected(one) for one in asked)


def test_a_step_that_nobody_wants_is_neither_reported_nor_in_the_way():
    free = request("a", 6, max_tokens=20, ignore_eos=True)
    position, token = end_token(free)
    driver = overlapping()
    driver.run(replace(free, params=replace(free.params, stop_token_ids=(token,))))
    assert not driver.core.has_unfinished
    assert len(driver.executor.queue) == 1
    before = driver.core.costs()
    driver.now += 100.0
    assert driver.core.costs().idle.device_ns - before.idle.device_ns == 100 * 10**9
    driver.core.add(request("next", 3))
    report = driver.step()
    assert (report.step, len(report.token_ids)) == (position + 2, 1)


# ---- when something breaks -------------------------------------------------------------------------------------


class Breaking(LateExecutor):
    """Raises what it is told to, at the launch or the end of a step of a number."""

    def __init__(self, at_launch=None, at_end=None):
        super().__init__(64, 4, VOCAB)
        self.at_launch, self.at_end = at_launch or {}, at_end or {}
        self.launches = self.ends = 0

    def launch(self, inputs, sampling):
        self.launches += 1
        if self.launches in self.at_launch:
            raise self.at_launch[self.launches]
        return super().launch(inputs, sampling)

    def execute(self, inputs, sampling):
        self.ends += 1
        if self.ends in self.at_end:
            raise self.at_end[self.ends]
        return super().execute(inputs, sampling)


@pytest.mark.parametrize("where", ["at_launch", "at_end"])
def test_an_executor_that_fails_with_a_step_in_flight_ends_the_engine(where):
    driver = overlapping(Breaking(**{where: {3: ValueError("surprise")}}))
    driver.core.add(request("a", 3, max_tokens=9, ignore_eos=True))
    with pytest.raises(EngineDeadError, match="the executor failed: surprise"):
        driver.drain()
    with pytest.raises(EngineDeadError, match="takes nothing more"):
        driver.core.step()
    driver.core.close()
    assert driver.executor.closed


def test_a_step_that_nobody_wants_still_tells_of_its_executors_end():
    free = request("a", 6, max_tokens=20, ignore_eos=True)
    position, token = end_token(free)
    driver = overlapping(Breaking(at_end={position + 2: EngineDeadError("rank 1 died")}))
    driver.run(replace(free, params=replace(free.params, stop_token_ids=(token,))))
    driver.core.add(request("next", 3))
    with pytest.raises(EngineDeadError, match="rank 1 died"):
        driver.step()


def test_closing_in_flight_waits_for_nothing():
    driver = overlapping()
    driver.core.add(request("a", 3))
    driver.step()
    driver.core.close()
    assert driver.executor.closed
    assert len(driver.executor.queue) == 1
    with pytest.raises(EngineDeadError, match="it was closed"):
        driver.core.step()


def test_a_step_without_memory_waits_for_the_one_that_runs_before_anybody_is_shed(caplog):
    asked = [request("old", 3, max_tokens=6, ignore_eos=True), request("new", 4, max_tokens=6, ignore_eos=True)]
    no_memory = StepMemoryError("no room")
    driver = overlapping(Breaking(at_launch={2: no_memory, 5: no_memory}))
    driver.run(*asked)
    assert [driver.tokens[one.request_id, 0] for one in asked] == [expected(one) for one in asked]
    assert driver.core.stats().steps_held == 2
    driver = overlapping(Breaking(at_launch={3: no_memory, 4: no_memory}))
    with caplog.at_level(logging.CRITICAL, "engine"):
        driver.run(*asked)
    assert driver.finished["new", 0].code == no_memory.code
    assert driver.tokens["old", 0] == expected(asked[0])


def test_a_step_that_cannot_be_prepared_ahead_loses_nothing_of_the_one_that_runs(monkeypatch):
    driver = overlapping()
    one = request("a", 3, max_tokens=5, ignore_eos=True)
    driver.core.add(one)
    driver.step()
    whole = driver.core._launcher._inputs.prepare
    monkeypatch.setattr(driver.core._launcher, "_fail_culprits", lambda schedule: False)
    monkeypatch.setattr(driver.core._launcher._inputs, "prepare", lambda schedule: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.step()
    monkeypatch.setattr(driver.core._launcher._inputs, "prepare", whole)
    driver.drain()
    assert driver.tokens["a", 0] == expected(one)


def test_a_request_that_cannot_be_prepared_ahead_fails_alone(monkeypatch, caplog):
    driver = overlapping()
    good, bad = request("good", 3, max_tokens=9, ignore_eos=True), request("bad", 4, max_tokens=9, ignore_eos=True)
    whole = driver.core._launcher._inputs.prepare

    def faulty(schedule):
        if any(one.request is bad and one.num_tokens > 6 for one in schedule.sequences):
            raise RuntimeError("struck")
        return whole(schedule)

    monkeypatch.setattr(driver.core._launcher._inputs, "prepare", faulty)
    with caplog.at_level(logging.CRITICAL, "engine"):
        driver.run(good, bad)
    assert driver.reason("bad") is FinishReason.ERROR
    assert driver.tokens["good", 0] == expected(good)
    assert driver.tokens["bad", 0] == expected(bad)[: len(driver.tokens["bad", 0])]


class Poisoning(LateExecutor):
    """The logits of the row that draws at `position` are bad."""

    position = 7

    def execute(self, inputs, sampling):
        outputs = super().execute(inputs, sampling)
        rows = (sampling.positions == self.position).nonzero()[0]
        outputs.token_ids = np.where(sampling.positions == self.position, 0, outputs.token_ids).astype(np.int32)
        outputs.failed = tuple(rows.tolist())
        return outputs


def test_what_a_step_in_flight_would_add_to_a_cache_that_was_cleared_is_not_found():
    driver = overlapping(Poisoning(64, 4, VOCAB))
    bad = request("bad", (5, 6, 7, 8, 9), max_tokens=9, ignore_eos=True)
    good = request("good", 2, max_tokens=4, ignore_eos=True)
    other = request("other", 10, max_tokens=2, ignore_eos=True)
    driver.run(bad, other, good)
    assert driver.reason("bad") is FinishReason.ERROR
    assert driver.tokens["bad", 0] == expected(bad)[:2]
    assert [driver.tokens[one.request_id, 0] for one in (good, other)] == [expected(good), expected(other)]
    driver = overlapping(max_num_batched_tokens=4)
    driver.core.add(request("a", 12, max_tokens=1))
    driver.step()  # the second block is being filled
    driver.core.reset_prefix_cache()
    assert driver.core.cached_blocks().stored == ()
    driver.step()
    assert driver.core.cached_blocks().stored == ()


@pytest.mark.parametrize(
    ("executor", "prompt", "n", "budget"),
    [(Poisoning, 6, 1, 16), (LateExecutor, 7, 1, 16), (LateExecutor, 9, 2, 8)],
    ids=["a bad row", "a block that is filled", "siblings that part"],
)
def test_what_a_step_brings_for_one_that_left_is_nothing_to_its_namesake(executor, prompt, n, budget, caplog):
    driver = overlapping(executor(64, 4, VOCAB), max_num_batched_tokens=budget)
    beside = request("beside", 1, seed=1, temperature=1.0, max_tokens=5, ignore_eos=True)
    heir = request("same", (9, 8), max_tokens=4, ignore_eos=True)
    driver.core.add(request("same", prompt, n=n, max_tokens=9, ignore_eos=True))
    driver.core.add(beside)
    driver.step()  # what draws at 7, or fills the second block, or ends the shared prompt, is in flight
    driver.core.abort("same")
    driver.core.add(heir)
    driver.tokens.pop(("same", 0), None)
    driver.step()
    assert [driver.finished.pop(("same", choice)).reason for choice in range(n)] == [FinishReason.ABORT] * n
    driver.drain()
    assert [driver.tokens[one.request_id, 0] for one in (heir, beside)] == [expected(heir), expected(beside)]
    assert driver.reason("same") is FinishReason.LENGTH
    assert not caplog.records


# ---- times and accounts ------------------------------------------------------------------------------------------


class Timed(LateExecutor):
    """Each step takes a second of the device, from when it is launched or the one before it has run."""

    def __init__(self):
        super().__init__(64, 4, VOCAB)
        self.now = 0.0
        self.free_at = 0.0

    def launch(self, inputs, sampling):
        step = super().launch(inputs, sampling)
        step.ends_at = self.free_at = max(self.free_at, self.now) + 1.0
        return step

    def run_until(self, wanted):
        super().run_until(wanted)
        self.now = max(self.now, wanted.ends_at)


class TimedDriver(Driver):
    """The clock is the executor's; each call of `step` begins `gap` seconds after the last one ended."""

    gap = 0.0

    @property
    def now(self):
        return self.executor.now if "executor" in vars(self) else 0.0

    @now.setter
    def now(self, value):
        if value:
            self.executor.now += self.gap


def test_device_seconds_are_counted_once_and_phases_are_true():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    driver.gap = 0.25
    driver.core.add(request("a", 3, max_tokens=5, ignore_eos=True))
    reports = []
    while driver.core.has_unfinished:
        reports.append(driver.step())
        driver.executor.now += 0.125 * driver.core.has_unfinished
        assert driver.core.costs().idle.device_ns == 10**9 // 4, "a step runs all the while"
    assert driver.executor.now == 0.25 + 5.0, "the host's quarters of a second are hidden but for the first"
    assert [report.executed for report in reports] == [1.0] * 5
    assert [report.seconds for report in reports] == [1.0] * 5
    assert driver.core.costs().tenants[""].device_ns == 5 * 10**9
    assert driver.core.costs().idle.device_ns == 10**9 // 4
    sequence = driver.finished["a", 0].sequence
    assert sequence.device_ns == 5 * 10**9
    assert (sequence.phases.prefill, sequence.phases.decode) == (1.0, 4.0)


def test_a_first_token_comes_when_it_is_told_and_not_when_it_is_launched():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    driver.core.add(request("a", 3, max_tokens=9, ignore_eos=True))
    driver.step()
    driver.core.add(request("b", (9, 8), max_tokens=2, ignore_eos=True))
    driver.drain()
    phases = driver.finished["b", 0].sequence.phases
    assert (phases.queue, phases.prefill, phases.decode) == (0.0, 2.0, 1.0), "a step runs as it comes"


def test_who_leaves_in_flight_pays_for_its_part_of_the_step():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    for name, prompt in (("stays", 4), ("leaves", 6)):
        tenant = replace(request(name, prompt, max_tokens=9, ignore_eos=True), tenant=name)
        driver.core.add(tenant)
    driver.step()
    driver.core.abort("leaves")
    driver.step()
    tenants = driver.core.costs().tenants
    assert tenants["leaves"].device_ns == 600_000_000 + 500_000_000
    assert driver.finished["leaves", 0].sequence.device_ns == tenants["leaves"].device_ns
    assert tenants["stays"].device_ns == 400_000_000 + 500_000_000


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 9), st.integers(1, 2))
        | st.tuples(st.just("step"), st.floats(0, 2))
        | st.tuples(st.just("abort"), st.integers(0, 12)),
        max_size=40,
    )
)
def test_accounts_add_up_whoever_leaves_in_flight(actions):
    driver = TimedDriver(executor=Timed(), async_scheduling=True, num_blocks=20, max_num_seqs=4)
    added = 0
    for what, *more in actions:
        if what == "add":
            tenant, prompt, most, n = more
            asked = request(f"r{added}", prompt, seed=added, temperature=1.0, max_tokens=most, n=n)
            driver.core.add(replace(asked, tenant=tenant, cache_salt=tenant.encode()))
            added += 1
        elif what == "abort":
            driver.core.abort(f"r{more[0]}")
        else:
            driver.gap = more[0]
            driver.step()
    driver.drain()
    costs = driver.core.costs()
    for name in ("device_ns", "block_ns"):
        told = sum(getattr(finish.sequence, name) for finish in driver.finished.values())
        assert told == sum(getattr(usage, name) for usage in costs.tenants.values())
