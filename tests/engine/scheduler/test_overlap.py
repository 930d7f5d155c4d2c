"""Steps that overlap: who is told what, who gets nothing, and what a step must wait for."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.request import FinishReason
from engine.scheduler.batch_state import BatchState
from engine.scheduler.schedule import Hold
from engine.scheduler.scheduler import Scheduler
from tests.engine.engine_driver import VOCAB, Driver, expected, request
from tests.engine.late_executor import LateExecutor
from tests.engine.test_core import ANYTHING, AllButTheEnd, end_token


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
    "penalties": {"presence_penalty": 0.5},
    "bad words": {"bad_words": "x", "bad_words_ids": ((5, 6), (7,), (1, 2, 3))},
    "grammar": {"structured": ANYTHING, "ignore_eos": False},
}
HELD = {
    Hold.FORKS: {"n": 2},
    Hold.PROMPTS: {"prompt_logprobs": 0},
}


@pytest.mark.parametrize("params", [*FREE.values(), *HELD.values()], ids=[*FREE, *map(str, HELD)])
def test_only_siblings_and_what_is_told_of_prompts_wait_for_a_step(params, monkeypatch):
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
    assert set(reasons) == {name for name, value in HELD.items() if value is params}
    assert driver.core.stats().steps_held == len(reasons)
    assert driver.core.stats().steps_ahead > 0


def test_rows_that_look_back_stop_nobody_and_nothing_waits():
    """Each step is launched before the one before is known, however many rows have penalties, words or a grammar."""
    asked = [
        request("plain", 5, seed=1, temperature=1.0, max_tokens=20, ignore_eos=True),
        request("penalised", 5, seed=2, temperature=1.0, frequency_penalty=0.3, max_tokens=20, ignore_eos=True),
        request("both", 3, repetition_penalty=1.1, max_tokens=20, bad_words="x", bad_words_ids=((3, 4), (7, 8, 9))),
        request("grammar", 4, seed=3, temperature=1.0, max_tokens=20, structured=ANYTHING),
    ]
    tokens = []
    for driver in (Driver(), overlapping()):
        for one in asked:
            driver.core.add(one, AllButTheEnd() if one.params.structured else None)
        driver.drain()
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    stats = driver.core.stats()
    assert (stats.steps_held, stats.steps_ahead) == (0, 20)


@pytest.mark.parametrize("words", [((5, 6),), ((1, 5), (2, 5), (5, 5)), ((4, 5, 6), (5,)), ((9, 8, 7, 6),)])
@pytest.mark.parametrize("seed", range(4))
def test_no_word_is_completed_by_a_token_that_was_in_flight(words, seed):
    asked = {"bad_words": "x", "bad_words_ids": words, "allowed_token_ids": (1, 2, 4, 5, 6, 7, 8, 9)}
    one = request("r", 3, seed=seed, temperature=1.0, max_tokens=60, ignore_eos=True, **asked)
    drivers = Driver(), overlapping()
    found = [driver.run(one)["r", 0] for driver in drivers]
    assert found[0] == found[1]
    text = found[1]
    assert not any(text[i : i + len(word)] == [*word] for word in words for i in range(len(text)))
    assert drivers[1].core.stats().steps_held == 0


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
    assert {one.request.request_id for one in driver.core._in_flight.step.schedule.sequences} == {
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
    before = driver.costs()
    driver.now += 100.0
    assert driver.costs().idle.device_ns - before.idle.device_ns == 100 * 10**9
    driver.core.add(request("next", 3))
    report = driver.step()
    assert (report.step, len(report.token_ids)) == (position + 2, 1)


def test_nobody_is_looked_for_among_all_that_draw(monkeypatch):
    """While hundreds of prompts begin beside hundreds that decode, that would take longer than a step."""

    class Unsearched(list):
        def __contains__(self, one):
            raise AssertionError("looked through")

    plan = BatchState.plan

    def planned(self, *args):
        schedule = plan(self, *args)
        if schedule is not None:
            schedule.samples = Unsearched(schedule.samples)
        return schedule

    monkeypatch.setattr(BatchState, "plan", planned)
    driver = overlapping(max_num_batched_tokens=5)
    asked = [request(f"r{i}", 3 * i, seed=i, temperature=1.0, ignore_eos=True) for i in range(1, 5)]
    for one in asked:
        driver.core.add(one)
    for _ in range(6):
        driver.step()
    driver.core.abort("r1")
    driver.drain()
    assert [driver.tokens[one.request_id, 0] for one in asked[1:]] == [expected(one) for one in asked[1:]]
