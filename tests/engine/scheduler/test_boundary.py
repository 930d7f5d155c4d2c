"""A bug of ours that shows while a request is worked on: whose end that is, and when it is the engine's."""

import asyncio
import logging
from dataclasses import replace

import pytest

from engine.errors import EngineDeadError, IntegrityError
from engine.request import FinishReason, Sequence
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.slots import Slots
from engine.scheduler.update import Updater
from engine.scheduler.waiting import Deadlines, WaitingQueue
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import Driver, expected, request
from tests.engine.test_core import ANYTHING, AllButTheEnd, NoEnd

BAD = replace(request("bad", (13, 12, 11, 10, 9), n=2, temperature=1.0, ignore_eos=True), tenant="bad")


def strike(monkeypatch, owner, stage, error, first=False):
    """Have a stage fail where it concerns `BAD`; first: it has done its work by then."""
    whole = getattr(owner, stage)

    def struck(one, *args):
        if not any(concerned(arg) for arg in args):
            return whole(one, *args)
        if first:
            whole(one, *args)
        raise error

    monkeypatch.setattr(owner, stage, struck)


def concerned(arg):
    if isinstance(arg, Sequence):
        return arg.request.request_id == "bad"
    return arg == "bad" or (isinstance(arg, list) and "bad" in arg)


@pytest.fixture
def looks(monkeypatch):
    """How often everything was looked through."""
    looks, whole = [], Scheduler.check_integrity
    monkeypatch.setattr(Scheduler, "check_integrity", lambda self: looks.append(1) or whole(self))
    return looks


def crowd():
    return [request(f"r{i}", 1 + i % 9, seed=i, n=1 + i % 2, temperature=1.0) for i in range(12)]


def busy(overlaps):
    """Return an engine that runs a crowd, which has to be exact whatever becomes of the one that comes now."""
    driver = Driver(num_blocks=128, max_num_seqs=32, max_num_batched_tokens=32, async_scheduling=overlaps)
    some = crowd()
    for one in some:
        driver.core.add(one)
    driver.step()
    return driver, some


def check_exact(driver, some):
    for one in some:
        for choice in range(one.params.n):
            assert driver.tokens[one.request_id, choice] == expected(one, choice)


STAGES = [
    (Slots, "place"),
    (Slots, "grow"),
    (Slots, "fork"),
    (Slots, "part"),
    (Slots, "seal"),
    (Updater, "_end_if_done"),
]
overlapping = pytest.mark.parametrize("overlaps", [False, True])


@overlapping
@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[stage for _, stage in STAGES])
def test_a_broken_invariant_is_nobodys_error_and_ends_the_engine(owner, stage, overlaps, monkeypatch):
    strike(monkeypatch, owner, stage, IntegrityError("a block is in two places"))
    driver, _ = busy(overlaps)
    driver.core.add(BAD)
    with pytest.raises(EngineDeadError, match="state is broken: a block is in two places"):
        driver.drain()
    assert not [finish for finish in driver.finished.values() if finish.reason is FinishReason.ERROR]
    for use in (driver.core.step, lambda: driver.core.add(request("next", 3))):
        with pytest.raises(EngineDeadError, match=r"takes nothing more.*a block is in two places"):
            use()


@overlapping
@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[stage for _, stage in STAGES])
def test_a_bug_that_left_everything_whole_ends_the_one_request(owner, stage, overlaps, monkeypatch, looks, caplog):
    """As when `allocate` finds that somebody miscounted, having changed nothing."""
    strike(monkeypatch, owner, stage, ValueError("2 KV blocks wanted, 1 available"))
    driver, some = busy(overlaps)
    driver.core.add(BAD)
    steps = 1
    while driver.core.has_unfinished:
        driver.step()
        steps += 1
    assert driver.finished["bad", 0].message == "the engine failed on this request (ValueError)"
    assert len(looks) > steps, "once more than the driver looks"
    assert {record.levelno for record in caplog.records if "failed in the engine" in record.msg} == {logging.ERROR}
    check_exact(driver, some)


@overlapping
@pytest.mark.parametrize(("owner", "stage"), [(Slots, "_taken"), (Slots, "_take_slot")])
def test_a_bug_that_leaves_things_half_changed_ends_the_engine(owner, stage, overlaps, monkeypatch, caplog):
    """Blocks that are in no table, a slot that is nobody's."""
    strike(monkeypatch, owner, stage, KeyError("struck"), first=True)
    if stage == "_take_slot":
        leave = Slots.leave
        monkeypatch.setattr(Slots, "leave", lambda self, one: None if concerned(one) else leave(self, one))
    driver, _ = busy(overlaps)
    driver.core.add(BAD)
    with caplog.at_level(logging.CRITICAL, "engine"), pytest.raises(EngineDeadError, match="state is broken"):
        driver.drain()
    assert ("bad", 0) not in driver.finished


@pytest.mark.parametrize("stage", ["fill", "accept"])
def test_what_reads_its_own_request_alone_makes_nobody_look_at_all_others(stage, monkeypatch, looks, caplog):
    def struck(*args):
        raise RuntimeError("struck")

    monkeypatch.setattr(NoEnd, stage, struck)
    driver, some = busy(overlaps=False)
    params = replace(BAD.params, ignore_eos=False, structured=ANYTHING)
    driver.core.add(replace(BAD, params=params), AllButTheEnd())
    steps = 1
    while driver.core.has_unfinished:
        driver.step()
        steps += 1
    assert driver.reason("bad") is FinishReason.ERROR
    assert len(looks) == steps
    check_exact(driver, some)


def test_one_that_cannot_be_added_is_taken_back_and_the_others_go_on(monkeypatch):
    driver, some = busy(overlaps=False)
    monkeypatch.setattr(Deadlines, "watch", lambda *args: {}["struck"])
    with pytest.raises(KeyError, match="struck"):
        driver.core.add(replace(BAD, deadline=1e9))
    driver.core.check_integrity()
    assert not driver.core.abort("bad")
    driver.drain()
    assert ("bad", 0) not in driver.tokens
    check_exact(driver, some)


def test_one_that_is_added_half_ends_the_engine(monkeypatch):
    driver, _ = busy(overlaps=False)
    strike(monkeypatch, WaitingQueue, "push", KeyError("struck"))
    strike(monkeypatch, WaitingQueue, "remove", KeyError("struck"))
    with pytest.raises(EngineDeadError, match="state is broken"):
        driver.core.add(BAD)
    with pytest.raises(EngineDeadError, match="takes nothing more"):
        driver.core.step()


async def test_streams_of_an_engine_whose_state_broke_go_on_elsewhere(monkeypatch):
    async with Lab() as lab:
        first = await lab.start("a", steps=3)
        some = [request(f"r{i}", 3 + i, seed=i, temperature=1.0, max_tokens=20, ignore_eos=True) for i in range(5)]
        tasks = [asyncio.create_task(lab.collect(one)) for one in some]
        await until(lambda: lab.dispatcher.counters.tokens >= 5)
        await lab.start("b")
        monkeypatch.setattr(first.engine._blocks, "seal", lambda *args: throw(IntegrityError("a block is lost")))
        first.executor.allow(10**6)
        assert await asyncio.gather(*tasks) == [{0: expected(one)} for one in some]
        assert "a block is lost" in first.core.dead_reason
        assert lab.dispatcher.counters.outcomes == {"completed": 5}


def throw(error):
    raise error
