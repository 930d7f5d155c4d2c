"""What separates queue, prefill and decode: when a sequence starts and when it draws its first token."""

from __future__ import annotations

from dataclasses import replace

from engine.request import Sequence
from tests.engine.engine_driver import Driver, request


def ended(driver: Driver, name: str, choice: int = 0) -> Sequence:
    return driver.finished[name, choice].sequence


def test_a_long_prompt_draws_its_first_token_steps_after_it_started():
    driver = Driver()
    driver.core.add(request("long", 40, max_tokens=3, ignore_eos=True))
    driver.drain()
    sequence = ended(driver, "long")
    assert sequence.arrival_time == 0.0
    assert sequence.started_at == 1.0  # the driver's clock is the number of the step
    assert sequence.first_token_at == 3.0  # 16 + 16 + 8 tokens


def test_who_waits_for_a_place_starts_later_than_it_came():
    driver = Driver(max_num_seqs=1)
    for name in ("first", "second"):
        driver.core.add(request(name, 4, max_tokens=3, ignore_eos=True))
    driver.drain()
    assert ended(driver, "first").started_at == 1.0
    assert ended(driver, "second").started_at == 4.0
    assert ended(driver, "second").first_token_at == 4.0


def test_preempted_sequence_keeps_its_first_start_and_token():
    driver = Driver(num_blocks=7)
    for name in ("a", "b"):
        driver.core.add(request(name, 8, max_tokens=12, ignore_eos=True))
    driver.drain()
    preempted = [one.sequence for one in driver.finished.values() if one.sequence.preemptions]
    assert preempted
    assert [(one.started_at, one.first_token_at) for one in preempted] == [(1.0, 1.0)]


def test_tokens_that_a_sequence_came_with_are_not_its_first_here():
    driver = Driver()
    driver.core.add(replace(request("moved", 30, max_tokens=8, ignore_eos=True), resume={0: (5, 6, 7)}))
    driver.drain()
    assert (ended(driver, "moved").started_at, ended(driver, "moved").first_token_at) == (1.0, 3.0)


def test_who_leaves_before_its_first_token_has_none():
    driver = Driver()
    driver.core.add(request("gone", 40, max_tokens=3))
    driver.step()
    driver.core.abort("gone")
    driver.drain()
    assert (ended(driver, "gone").started_at, ended(driver, "gone").first_token_at) == (1.0, None)
