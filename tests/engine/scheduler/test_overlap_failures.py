"""What fails while a step is in flight: its executor, its memory, one request, the logits of somebody."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import EngineDeadError, StepMemoryError
from engine.request import FinishReason
from tests.engine.engine_driver import EOS, VOCAB, Driver, expected, request
from tests.engine.late_executor import LateExecutor
from tests.engine.scheduler.test_overlap import overlapping
from tests.engine.test_core import ANYTHING, AllButTheEnd, NoEnd, end_token


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


@pytest.mark.parametrize("stage", ["accept", "fill"])
def test_a_grammar_that_fails_on_a_token_in_flight_ends_its_own_request(stage, monkeypatch, caplog):
    whole, calls = getattr(NoEnd, stage), []

    def failing(state, argument):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("struck")
        return whole(state, argument)

    monkeypatch.setattr(NoEnd, stage, failing)
    driver = overlapping()
    good = [request(f"g{i}", 3 + i, max_tokens=12, ignore_eos=True, frequency_penalty=0.2 * i) for i in range(2)]
    bad = request("bad", 4, max_tokens=12, structured=ANYTHING)
    for one in good:
        driver.core.add(one)
    driver.core.add(bad, AllButTheEnd())
    with caplog.at_level(logging.CRITICAL, "engine"):
        driver.drain()
    alone = Driver().run(*good)
    assert all(driver.tokens[one.request_id, 0] == alone[one.request_id, 0] for one in good)
    assert driver.reason("bad") is FinishReason.ERROR
    assert len(driver.tokens["bad", 0]) == (4 if stage == "accept" else 3)
    assert driver.core.stats().steps_held == 0


def test_a_row_without_a_token_tells_its_grammar_of_none(monkeypatch):
    """The mask of the step after is made from what it drew, which was nothing."""
    monkeypatch.setattr(NoEnd, "accept", lambda state, token: False)
    driver = overlapping()
    driver.core.add(request("a", 4, max_tokens=12, structured=ANYTHING, allowed_token_ids=(EOS,)), AllButTheEnd())
    driver.drain()
    assert driver.finished["a", 0].code == "no_token_left"


def test_an_executor_that_fails_while_a_mask_waits_for_its_step_ends_the_engine():
    driver = overlapping(Breaking(at_end={3: EngineDeadError("rank 1 died")}))
    driver.core.add(request("a", 4, max_tokens=12, structured=ANYTHING), AllButTheEnd())
    with pytest.raises(EngineDeadError, match="rank 1 died"):
        driver.drain()
    with pytest.raises(EngineDeadError, match="takes nothing more"):
        driver.core.step()


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
