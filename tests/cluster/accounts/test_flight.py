"""The flight recorder: what requests wait for in an engine, within bounds, and nothing of those that do not wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.accounts.engine_accounts import EngineAccounts
from cluster.accounts.flight_recorder import MAX_TOLD, FlightRecorder, Wait, is_of
from engine.events import Preempted, Starved
from tests.engine.engine_driver import Driver, request


def waits(driver: Driver, name: str) -> list[tuple[float, Wait]]:
    return [(event.at, event.what) for event in driver.accounts.flight.of(name)]


def recorder(**bounds) -> FlightRecorder:
    return FlightRecorder(lambda: 0.0, **bounds)


def test_oldest_requests_are_forgotten_first():
    flight = recorder(max_requests=3)
    for name in "abcbd":
        flight.note(name, Wait.QUEUE)
    assert list(flight.everything()) == ["b", "c", "d"]
    assert "a" not in flight
    assert flight.story("a") == ()


def test_long_stories_keep_their_beginning_and_their_end():
    flight = recorder(max_events=4)
    for i in range(100):
        flight.note("r", Wait.QUEUE, str(i), float(i))
    assert [event.detail for event in flight.story("r")] == ["0", "1", "98", "99"]


@pytest.mark.parametrize(
    ("key", "name", "same"),
    [
        ("cmpl-1", "cmpl-1", True),
        ("cmpl-1-0", "cmpl-1", True),
        ("cmpl-1@2.16", "cmpl-1", True),
        ("cmpl-12", "cmpl-1", False),
        ("cmpl-1", "cmpl-12", False),
        ("cmpl-a1b2", "cmpl", False),
        ("cmpl-0123456789012345", "cmpl", False),
        ("cmpl-a1b2@2.16", "cmpl", False),
        ("cmpl-a1-7@2.16", "cmpl-a1", True),
        ("cmpl-1", "", False),
    ],
)
def test_parts_and_attempts_bear_the_name_of_their_request(key, name, same):
    assert is_of(key, name) is same
    flight = recorder()
    flight.note(key, Wait.RUNS)
    assert bool(flight.of(name)) is same


def test_stories_are_told_to_their_own_tenant():
    flight = recorder()
    flight.note("cmpl-1", Wait.TURN, tenant="a")
    flight.note("cmpl-1", Wait.LET_IN)
    assert [event.what for event in flight.of("cmpl-1", "a")] == [Wait.TURN, Wait.LET_IN]
    assert flight.of("cmpl-1", "b") == []
    assert len(flight.of("cmpl-1")) == 2


def test_an_engine_notes_whose_requests_wait():
    driver = Driver(max_num_seqs=1, num_blocks=8, max_model_len=28)
    for name, tenant in (("a", "one"), ("b", "two"), ("c", "two")):
        driver.core.add(replace(request(name, 4, max_tokens=3, ignore_eos=True), tenant=tenant))
    driver.drain()
    for name in "bc":
        assert driver.accounts.flight.of(name, "two")
        assert driver.accounts.flight.of(name, "one") == []


def test_an_answer_is_bounded_and_keeps_the_latest():
    flight = recorder(max_requests=100)
    for part in range(100):
        for at in range(20):
            flight.note(f"cmpl-1-{part}", Wait.QUEUE, at=float(at))
    told = flight.of("cmpl-1")
    assert len(told) == MAX_TOLD
    assert told[-1].at == 19.0


def test_nothing_is_recorded_of_requests_that_wait_for_nothing():
    driver = Driver()
    driver.run(*(request(f"r{i}", 4, ignore_eos=True) for i in range(3)))
    assert driver.accounts.flight.everything() == {}


def test_slots_are_waited_for_in_turn():
    driver = Driver(max_num_seqs=1)
    for name in "abc":
        driver.core.add(request(name, 2, max_tokens=2, ignore_eos=True))
    driver.drain()
    assert waits(driver, "a") == []
    assert waits(driver, "b") == [(1.0, Wait.SLOTS), (3.0, Wait.RUNS), (4.0, Wait.ENDED)]
    assert waits(driver, "c") == [(0.0, Wait.QUEUE), (3.0, Wait.SLOTS), (5.0, Wait.RUNS), (6.0, Wait.ENDED)]


def test_those_behind_the_first_wait_in_the_queue():
    driver = Driver(max_num_seqs=2)
    for name in "abcd":
        driver.core.add(request(name, 2, max_tokens=2, ignore_eos=True))
    driver.drain()
    assert waits(driver, "c") == [(1.0, Wait.SLOTS), (3.0, Wait.RUNS), (4.0, Wait.ENDED)]
    assert waits(driver, "d") == [(0.0, Wait.QUEUE), (3.0, Wait.RUNS), (4.0, Wait.ENDED)]


def test_those_behind_the_first_are_told_of_while_they_wait():
    driver = Driver(max_num_seqs=1)
    for name in "abc":
        driver.core.add(request(name, 2, max_tokens=4, ignore_eos=True))
    driver.step()
    driver.core.add(request("d", 2, max_tokens=4))
    assert waits(driver, "c") == [(0.0, Wait.QUEUE)]
    assert waits(driver, "d") == [], "no step has passed it over"
    driver.step()
    assert waits(driver, "d") == [(1.0, Wait.QUEUE)]
    driver.drain()
    assert [what for _, what in waits(driver, "d")] == [Wait.QUEUE, Wait.SLOTS, Wait.RUNS, Wait.ENDED]


def test_one_that_ends_in_the_queue_leaves_word_of_it():
    driver = Driver(max_num_seqs=1)
    for name in "abc":
        driver.core.add(request(name, 2, max_tokens=4, ignore_eos=True))
    driver.step()
    driver.core.abort("c")
    driver.step()
    assert waits(driver, "c") == [(0.0, Wait.QUEUE), (2.0, Wait.ENDED)]


def test_what_a_router_told_hides_no_wait_in_the_queue():
    driver = Driver(max_num_seqs=1)
    driver.accounts.flight.note("c", Wait.LET_IN, at=0.0)
    for name in "abc":
        driver.core.add(request(name, 2, max_tokens=2, ignore_eos=True))
    driver.drain()
    assert [what for _, what in waits(driver, "c")][:3] == [Wait.LET_IN, Wait.QUEUE, Wait.SLOTS]


def test_budget_is_waited_for():
    driver = Driver(max_num_batched_tokens=8)
    driver.core.add(request("a", 16, max_tokens=1))
    driver.core.add(request("b", 2, max_tokens=1))
    driver.drain()
    assert waits(driver, "b") == [(1.0, Wait.BUDGET), (3.0, Wait.RUNS), (3.0, Wait.ENDED)]


def test_running_sequences_that_get_no_token_wait_for_budget():
    driver = Driver(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    driver.core.add(request("a", 12, max_tokens=1))
    driver.core.add(request("b", 9, max_tokens=1))
    driver.step()  # 6 and 2
    driver.core.add(request("c", 9, max_tokens=1))
    driver.drain()
    assert (3.0, Wait.RUNS) in waits(driver, "c")
    assert {what for _, what in waits(driver, "c")} >= {Wait.BUDGET, Wait.ENDED}


def test_blocks_are_waited_for_and_preemption_is_told():
    driver = Driver(num_blocks=8, max_model_len=28, enable_prefix_caching=False)
    driver.core.add(request("a", 10, max_tokens=12, ignore_eos=True))
    driver.core.add(request("b", 11, max_tokens=12, ignore_eos=True))
    driver.core.add(request("c", 9, max_tokens=2, ignore_eos=True))
    driver.drain()
    assert driver.core.stats().preemptions
    assert waits(driver, "c")[:2] == [(1.0, Wait.BUDGET), (2.0, Wait.BLOCKS)]
    assert [what for _, what in waits(driver, "b")] == [Wait.PREEMPTION, Wait.BLOCKS, Wait.RUNS, Wait.ENDED]
    (told,) = [event.detail for event in driver.accounts.flight.of("b") if event.what is Wait.ENDED]
    assert told.startswith("choice 0: length after 12 tokens; ")


def test_one_that_is_preempted_while_it_waits_for_budget_does_not_run():
    accounts, it = EngineAccounts(lambda: 0.0), request("r", 4)
    for event in (Starved((it,), 1.0), Preempted(it, 1.0), Starved((), 1.0)):
        accounts.note(event)
    assert [event.what for event in accounts.flight.story("r")] == [Wait.BUDGET, Wait.PREEMPTION]


def test_decodes_that_got_no_token_are_told_to_run_again():
    driver = Driver(max_num_batched_tokens=4, max_num_seqs=7)
    for name, max_tokens in (("a", 4), ("b", 9)):
        driver.core.add(request(name, 1, n=3, max_tokens=max_tokens, ignore_eos=True))
    driver.drain()
    story = [what for _, what in waits(driver, "b")]
    assert story == [Wait.BUDGET, Wait.RUNS, Wait.ENDED, Wait.ENDED, Wait.ENDED]


def test_wait_is_noted_once_however_many_steps_it_lasts():
    driver = Driver(max_num_seqs=1)
    driver.core.add(request("a", 2, max_tokens=30, ignore_eos=True))
    driver.core.add(request("b", 2, max_tokens=1))
    driver.drain()
    assert len(waits(driver, "b")) == 3


def test_a_request_that_is_preempted_twice_waits_for_blocks_twice():
    driver = Driver(num_blocks=9, max_num_seqs=4, block_size=2, max_model_len=16)
    for number, length in ((1, 6), (2, 10), (3, 8)):
        driver.core.add(request(f"r{number}", number, max_tokens=length, ignore_eos=True))
    driver.drain()
    whats = [what for _, what in waits(driver, "r3")]
    assert whats == [Wait.PREEMPTION, Wait.BLOCKS, Wait.RUNS] * 2 + [Wait.ENDED]
