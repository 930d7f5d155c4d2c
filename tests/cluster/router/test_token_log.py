"""The token log: nothing lost, doubled or told twice, and enough remembered to go on elsewhere."""

from __future__ import annotations

import asyncio

from cluster.errors import ApiError
from cluster.router.token_log import TokenLog
from cluster.token_source import TokenChunk
from engine.report import TokenLogprob
from tests.engine.engine_driver import request


def test_what_came_since_the_last_take_is_one_chunk_per_choice():
    log = TokenLog(request("r", 3, n=2))
    log.choices[0].tokens += [1, 2]
    log.choices[1].tokens += [7]
    assert log.take() == [TokenChunk(0, (1, 2)), TokenChunk(1, (7,))]
    assert log.take() == []
    log.choices[1].tokens += [8]
    log.choices[1].finish("stop")
    assert log.take() == [TokenChunk(1, (8,), finish_reason="stop")]
    assert log.take() == []


def test_end_without_a_token_is_told_once():
    log = TokenLog(request("r", 3))
    log.choices[0].finish("length")
    assert log.take() == [TokenChunk(0, (), finish_reason="length")]
    assert log.take() == []
    assert log.finished


def test_log_probabilities_go_with_their_tokens():
    log = TokenLog(request("r", 3, logprobs=0))
    entries = [TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)]
    log.choices[0].tokens += [1]
    log.choices[0].logprobs += entries[:1]
    assert log.take()[0].logprobs == (entries[0],)
    log.choices[0].tokens += [2]
    log.choices[0].logprobs += entries[1:]
    assert log.take()[0].logprobs == (entries[1],)


def test_only_unfinished_choices_go_on_elsewhere():
    log = TokenLog(request("r", 3, n=3))
    log.choices[0].tokens += [1, 2]
    log.choices[1].tokens += [3]
    log.choices[1].finish("stop")
    assert log.resume() == {0: (1, 2), 2: ()}


def test_a_request_of_which_no_token_came_begins_anew_elsewhere():
    assert TokenLog(request("r", 3, n=3)).resume() is None


def test_choice_that_the_consumer_ended_says_no_more():
    log = TokenLog(request("r", 3, n=2))
    log.choices[0].tokens += [1, 2]
    log.choices[0].discard()
    log.choices[0].finish("length")
    assert log.take() == []
    assert log.choices[0].finish_reason == "stop"
    assert log.num_open == 1


def test_request_that_came_with_a_log_tells_only_what_is_new():
    resumed = request("r", 3, n=2)
    resumed = type(resumed)(**{**{f: getattr(resumed, f) for f in resumed.__slots__}, "resume": {1: (5, 6)}})
    log = TokenLog(resumed)
    assert list(log.choices) == [1]
    log.choices[1].tokens.append(7)
    assert log.take() == [TokenChunk(1, (7,))]
    assert log.resume() == {1: (5, 6, 7)}


async def test_first_error_stays_and_wakes_the_consumer():
    log = TokenLog(request("r", 3))
    waiting = asyncio.ensure_future(log.next_news(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    first = ApiError("slow_consumer", "first")
    log.fail(first)
    log.fail(ApiError("internal_error", "second"))
    await asyncio.wait_for(waiting, 5)
    assert log.error is first


async def test_waking_a_consumer_that_was_cancelled_harms_nobody():
    log = TokenLog(request("r", 3))
    waiting = asyncio.ensure_future(log.next_news(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    waiting.cancel()
    log.wake()
    log.wake()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
