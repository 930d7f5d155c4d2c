"""What cannot be handled harms its own request alone: no link is lost for it, and nothing goes round for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.replica import core
from cluster.replica.runs import RouterSession
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.selection import Chooser
from cluster.router.token_log import TokenLog
from cluster.wire.replica_messages import LogprobRow
from tests.cluster.cluster_lab import Lab, long_request, oracle, until

BYSTANDERS = [long_request(f"r{i}", seed=i) for i in range(20)]
WORDS = "what a prompt says"


def failing(method: Callable[..., Any], concerned: Callable[..., bool]) -> Callable[..., Any]:
    """Return what does as `method`, but raises what nobody expects where a call is `concerned`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if concerned(*args):
            raise KeyError(WORDS)
        return method(*args, **kwargs)

    return call


async def ask_beside_bystanders(lab: Lab, **params: Any) -> ApiError:
    """Run the request `bad` among others, which must get their tokens, and return its error."""
    bad = long_request("bad", **params)
    running = [asyncio.create_task(lab.collect(r)) for r in [*BYSTANDERS[:10], bad, *BYSTANDERS[10:]]]
    results = await asyncio.gather(*running, return_exceptions=True)
    error = results.pop(10)
    assert results == [oracle(r) for r in BYSTANDERS]
    assert isinstance(error, ApiError), error
    return error


async def test_submit_that_no_replica_can_handle_ends_with_one_error_and_no_link_is_lost(monkeypatch, caplog):
    bad = failing(core.submitted_request, lambda submit, *_: submit.request_id == "bad")
    monkeypatch.setattr(core, "submitted_request", bad)
    async with Lab() as lab:
        replicas = [await lab.start(name, pace=0.001) for name in "ab"]
        error = await ask_beside_bystanders(lab)
        assert (error.code, error.status, error.retryable, error.request_id) == ("internal_error", 500, False, "bad")
        assert lab.lost == []
        assert lab.dispatcher.counters.migrations == 0
        for replica in replicas:
            await until(lambda replica=replica: replica.core.num_requests == replica.held_blocks == 0)
    assert WORDS not in caplog.text


async def test_submit_that_no_replica_can_read_ends_with_one_error_and_no_link_is_lost():
    async with Lab() as lab:
        for name in "ab":
            await lab.start(name, pace=0.001)
        bystanders = [asyncio.create_task(lab.collect(r)) for r in BYSTANDERS]
        error = await asyncio.gather(lab.collect(long_request("b" * 300)), return_exceptions=True)
        assert [one.code for one in error] == ["internal_error"]
        assert await asyncio.gather(*bystanders) == [oracle(r) for r in BYSTANDERS]
        assert lab.lost == []


async def test_log_probabilities_that_make_no_sense_end_their_request_alone(monkeypatch):
    def uneven(session: RouterSession, entry: Any) -> None:
        session.logprobs.append(LogprobRow(len(session.streams) - 1, entry.logprob, [1, 2], [0.5]))

    monkeypatch.setattr(RouterSession, "add_logprobs", uneven)
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.001)
        error = await ask_beside_bystanders(lab, logprobs=2)
        assert (error.code, error.retryable) == ("internal_error", True)
        assert lab.lost == []
        assert lab.dispatcher.counters.misplaced_rows == 0
        await until(lambda: replica.core.num_requests == 0)


async def test_part_of_a_report_that_the_router_cannot_take_in_ends_its_request_alone(monkeypatch, caplog):
    bad = failing(TokenLog.add_prompt_logprobs, lambda log, *_: log.request.request_id == "bad")
    monkeypatch.setattr(TokenLog, "add_prompt_logprobs", bad)
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.001)
        error = await ask_beside_bystanders(lab, prompt_logprobs=1)
        assert (error.code, error.retryable) == ("internal_error", True)
        assert lab.lost == []
        await until(lambda: replica.core.num_requests == 0)
    assert WORDS not in caplog.text


async def test_request_that_no_replica_can_be_chosen_for_keeps_nobody_from_being_moved(monkeypatch):
    bad = failing(Chooser.choose, lambda _, live, __: live.request_id == "bad" and live.was_submitted)
    monkeypatch.setattr(Chooser, "choose", bad)
    async with Lab() as lab:
        await lab.start("a", steps=0)
        asked = asyncio.create_task(ask_beside_bystanders(lab))
        await until(lambda: lab.alive["a"].core.num_requests == 21)
        await lab.start("b")
        lab.kill("a")
        assert (await asked).code == "internal_error"
        assert lab.dispatcher.num_live == 0


async def test_message_about_no_request_that_the_router_cannot_handle_costs_no_link(monkeypatch):
    async with Lab() as lab:
        await lab.start("a", pace=0.001)
        monkeypatch.setattr(lab.dispatcher._replicas, "note_heartbeat", failing(lambda *_: None, lambda *_: True))
        await until(lambda: any(type(one).__name__ == "Heartbeat" for one in lab.alive["a"].links[0].heard))
        await asyncio.gather(*map(lab.collect, BYSTANDERS))
        assert lab.lost == []


async def test_figures_that_fail_do_not_end_the_watch_over_silent_replicas():
    async with Lab(DispatcherConfig(stall_timeout=0.4, ping_interval=0.1)) as lab:
        silent = await lab.start("silent")
        lab.dispatcher.watch_queue(failing(lambda: None, lambda: True))
        await asyncio.sleep(0.2)  # some looks, each of which asks for the figures
        assert lab.lost == []
        silent.links[0].hold()
        await until(lambda: lab.lost == [("silent", "stalled")])
        silent.links[0].release()


@pytest.mark.parametrize("seats", [16, 3])
async def test_request_that_breaks_each_link_is_not_moved_for_ever(monkeypatch, seats):
    """A fault that cannot be contained: its replica cannot send the report that holds the request's first token."""
    broken = failing(RouterSession.flush, lambda session, *_: would_tell_of_bad(session))
    monkeypatch.setattr(RouterSession, "flush", broken)
    async with Lab(max_num_seqs=seats) as lab:  # with few, most wait for a place while links break
        replicas = [await lab.start(name, pace=0.001) for name in "ab"]
        links = asyncio.create_task(keep_linked(lab))
        error = await ask_beside_bystanders(lab)
        links.cancel()
        assert (error.code, error.status, error.request_id) == ("replica_lost", 503, "bad")
        assert {code for _, code in lab.lost} == {"damaged"}
        assert 9 <= len(lab.lost) <= 12
        for replica in replicas:
            await until(lambda replica=replica: replica.core.num_requests == replica.held_blocks == 0)


def would_tell_of_bad(session: RouterSession) -> bool:
    runs = [run for run in session.runs.values() if run.engine_id.startswith("bad@")]
    return any(lane.key in session.streams for run in runs for lane in run.lanes.values())


async def keep_linked(lab: Lab) -> None:
    """Link up again with each replica whose link was lost, as a router does."""
    told = 0
    while True:
        await until(lambda told=told: len(lab.lost) > told, deadline=60)
        await lab.link(lab.alive[lab.lost[told][0]])
        told += 1
