"""An engine that sleeps between steps says the same tokens as one that never did."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError, ConfigError, EngineDeadError, StepMemoryError
from engine.request import FinishReason
from tests.engine.engine_driver import VOCAB, Driver, expected, request
from tests.fake_executor import FakeExecutor


def asks():
    return [
        request("greedy", 9, max_tokens=20, ignore_eos=True),
        request("drawn", 21, seed=5, temperature=1.0, n=3, max_tokens=15, ignore_eos=True),
        request("late", 5, seed=2, temperature=0.7, max_tokens=12, ignore_eos=True),
    ]


def check(driver, requests):
    for one in requests:
        for choice in range(one.params.n):
            assert driver.tokens[one.request_id, choice] == expected(one, choice)
            assert driver.reason(one.request_id, choice) is FinishReason.LENGTH


@settings(max_examples=40)
@given(
    sleeps=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2]), st.integers(0, 2)), max_size=6),
    overlaps=st.booleans(),
)
def test_no_token_is_lost_and_none_is_extra(sleeps, overlaps):
    driver = Driver(async_scheduling=overlaps)
    first, second, late = asks()
    for one in (first, second):
        driver.core.add(one)
    for number, (steps, level, while_asleep) in enumerate(sleeps):
        for _ in range(steps):
            driver.step()
        driver.core.sleep(level)
        assert driver.core.stats().num_running == 0
        assert driver.core.stats().kv_blocks_free == driver.core.stats().kv_blocks_total
        for step in range(while_asleep):
            computed = driver.step().num_tokens
            assert not computed or (overlaps and step == 0), "only what was on its way is told"
        if number == 1:
            driver.core.add(late)
        driver.core.wake_up()
        driver.core.check_integrity()
    if len(sleeps) < 2:
        driver.core.add(late)
    driver.drain()
    check(driver, (first, second, late))


def test_requests_that_come_meanwhile_wait_and_may_be_aborted_or_pass_their_deadline():
    driver = Driver()
    stays, goes, runs_out = asks()[0], request("goes", 5), request("out", 5)
    driver.core.add(goes)
    driver.step()
    driver.core.sleep()
    driver.core.add(stays)
    driver.core.add(runs_out)
    driver.core.abort("goes")
    report = driver.step()
    assert [finish.reason for finish in report.finished] == [FinishReason.ABORT]
    assert driver.core.has_unfinished
    assert driver.core.stats().num_waiting == 2
    driver.core.wake_up()
    driver.drain()
    check(driver, [stays])


def test_cached_prefixes_are_forgotten_and_routers_hear_of_it():
    driver = Driver()
    driver.run(request("one", 16))
    driver.core.sleep()
    events = driver.step().events
    assert events.cleared
    assert not events.stored
    driver.core.wake_up()
    before = driver.core.stats().prefix_hit_tokens
    driver.run(again := request("again", 16))
    assert driver.core.stats().prefix_hit_tokens == before
    assert driver.tokens["again", 0] == expected(again)


def test_parts_are_woken_one_by_one():
    driver = Driver()
    driver.core.add(one := request("one", 5, ignore_eos=True))
    driver.core.sleep()
    driver.core.wake_up(["weights"])
    assert driver.core.is_sleeping
    assert driver.step().token_ids == []
    with pytest.raises(ConfigError, match=r"call wake_up\(\) first"):
        driver.core.sleep()
    driver.core.wake_up(["weights", "kv_cache"])
    assert not driver.core.is_sleeping
    driver.core.wake_up()
    driver.drain()
    assert driver.tokens["one", 0] == expected(one)


def test_what_cannot_be_done_is_refused_before_anything_changes():
    driver = Driver()
    with pytest.raises(ConfigError, match="level must be 1 or 2, not 3"):
        driver.core.sleep(3)
    driver.core.sleep(1)
    driver.core.sleep(1)
    with pytest.raises(ConfigError, match=r"level 1; call wake_up\(\) first"):
        driver.core.sleep(2)
    with pytest.raises(ConfigError, match=r"tags must be a list such as \['kv_cache'\], not 'kv_cache'"):
        driver.core.wake_up("kv_cache")
    with pytest.raises(ConfigError, match="tags must be among weights, kv_cache, not 'kv'"):
        driver.core.wake_up(["kv_cache", "kv"])
    driver.core.wake_up(["weights"])
    assert driver.core.is_sleeping, "the cache was not woken by the call that was refused"
    driver.core.wake_up()
    driver.core.sleep(2)
    driver.core.sleep(1)
    driver.core.close()
    for call in (driver.core.sleep, driver.core.wake_up):
        with pytest.raises(EngineDeadError):
            call()


class Unwilling(FakeExecutor):
    """Fails to wake its weights up as often as it is told to."""

    def __init__(self, error):
        super().__init__(64, 4, VOCAB)
        self.error = error

    def wake(self, tag):
        if tag == "weights" and self.error is not None:
            error, self.error = self.error, None
            raise error
        super().wake(tag)


def test_weights_that_cannot_be_read_leave_it_asleep_and_it_may_be_tried_again():
    driver = Driver(executor=Unwilling(CheckpointError("gone")))
    driver.core.add(one := request("one", 5, ignore_eos=True))
    driver.step()
    driver.core.sleep(2)
    with pytest.raises(CheckpointError, match="gone"):
        driver.core.wake_up()
    assert driver.core.is_sleeping
    driver.core.wake_up()
    driver.drain()
    assert driver.tokens["one", 0] == expected(one)


def test_whatever_else_fails_ends_the_engine():
    driver = Driver(executor=Unwilling(RuntimeError("cuda is upset")))
    driver.core.sleep()
    with pytest.raises(RuntimeError):
        driver.core.wake_up()
    with pytest.raises(EngineDeadError, match="neither sleeps nor wakes: cuda is upset"):
        driver.core.wake_up()


def test_the_step_on_its_way_is_told_even_if_it_was_the_last():
    driver = Driver(async_scheduling=True)
    driver.core.add(one := request("one", 5, max_tokens=2, ignore_eos=True))
    driver.step()
    driver.core.sleep()
    assert driver.core.has_unfinished
    report = driver.step()
    assert report.token_ids == expected(one)[1:]
    assert [finish.reason for finish in report.finished] == [FinishReason.LENGTH]
    assert not driver.core.has_unfinished


class Crowded(FakeExecutor):
    """Has no room for weights on the host, the first time."""

    full = True

    def sleep(self, level):
        if self.full:
            self.full = False
            raise StepMemoryError("no room")
        super().sleep(level)


def test_an_engine_that_finds_no_room_to_sleep_goes_on():
    driver = Driver(executor=Crowded(64, 4, VOCAB))
    driver.core.add(one := request("one", 5, ignore_eos=True))
    driver.step()
    with pytest.raises(StepMemoryError):
        driver.core.sleep()
    assert not driver.core.is_sleeping
    driver.step()
    driver.core.sleep()
    driver.core.wake_up()
    driver.drain()
    assert driver.tokens["one", 0] == expected(one)


@pytest.mark.parametrize(
    ("device", "level", "released"),
    [("cpu", 1, ("kv_cache",)), ("cpu", 2, ("weights", "kv_cache")), ("cuda", 1, ("weights", "kv_cache"))],
)
def test_what_is_asleep_and_what_memory_that_frees_is_told(device, level, released):
    """On a CPU the weights are in the host's memory anyway: at level 1 they stay where they are."""
    driver = Driver(device=device)
    assert (driver.core.sleep_level, driver.core.asleep, driver.core.released) == (0, (), ())
    driver.core.sleep(level)
    assert (driver.core.sleep_level, driver.core.asleep) == (level, ("weights", "kv_cache"))
    assert driver.core.released == released
    driver.core.wake_up(["weights"])
    assert driver.core.asleep == driver.core.released == ("kv_cache",)
