"""Messages: what is sent arrives, what is damaged is refused by one typed error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.accounts.flight_recorder import Wait
from cluster.wire.codec import DamagedMessageError, decode_down, decode_up, encode
from cluster.wire.parts import Load, ReplicaCosts, ResourceUsage, SleepState, Waited
from cluster.wire.replica_messages import (
    BlockUpdate,
    Draining,
    Explained,
    FinishRow,
    Heartbeat,
    LogprobRow,
    Rejected,
    Report,
    Welcome,
)
from cluster.wire.router_messages import Abort, Explain, FinishChoice, Hello, Ping, Resync
from cluster.wire.translation import block_key, load_of, submit_message, submitted_request
from engine.errors import InvalidRequestError
from engine.report import EngineStats
from engine.request import Request
from engine.sampling_params import MAX_N, SamplingParams

LOAD = Load(1, 2, 3, 4, 1, 2, 7, 8, 9, 10, 11, 0.5)
COSTS = ReplicaCosts(
    ResourceUsage(4.0, 1e13), ResourceUsage(1.5, 0.5), {"team-a": ResourceUsage(2.5, 0.25), "": ResourceUsage()}
)
REPORT = Report(
    3,
    2**62,
    17,
    [16, 17],
    [0, 4],
    [5, 70000],
    LOAD,
    [FinishRow(17, "stop", 5, "why", "", ResourceUsage(0.25, 1e13))],
    [LogprobRow(1, -0.25, [5, 6], [-0.25, -2.0])],
    [(16, 32)],
    BlockUpdate(4, [2**64 - 1], [0], cleared=True),
    others=4,
    costs=COSTS,
)


@pytest.mark.parametrize(
    "message",
    [
        Hello("r"),
        Abort(5),
        FinishChoice(16, 3),
        Ping(),
        Ping(3, 400, 2.5, 90.0, 48),
        Resync(),
        Explain(3, "cmpl-1", "team-a"),
        Explain(3, "cmpl-1", None),
    ],
)
def test_messages_going_up_arrive_as_sent(message):
    assert decode_up(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome("a", 2**62, "model", 100, 61, 4, 9, (0, 2), draining=True),
        REPORT,
        Rejected(7, "code", "text", "param"),
        Heartbeat(9, LOAD),
        Heartbeat(9, LOAD, 3, 2, COSTS, 49, [16, 32, 33]),
        Heartbeat(9, LOAD, sleep=SleepState("7f3a", 3, 1, ("weights", "kv_cache"), ("kv_cache",), "no room")),
        Draining(),
        Draining(hand_over=True),
        Explained(3, [Waited(2.5, Wait.BLOCKS, "9 for its tokens"), Waited(0.0, Wait.RUNS)]),
    ],
)
def test_messages_coming_down_arrive_as_sent(message):
    assert decode_down(encode(message)) == message


def test_request_arrives_whole():
    params = SamplingParams(
        n=3, temperature=0.5, seed=-(2**63), stop=("é", "\x00"), stop_token_ids=(1, 2), logprobs=5
    )
    request = Request("r", (1, 2**31 - 1), params, seed=2**63 - 1, priority=-3, cache_salt=b"\xff\x00", tenant="t")
    submit = decode_up(encode(submit_message(request, 32, {0: (4, 5), 2: ()})))
    arrived = submitted_request(submit, "engine id")
    assert arrived == Request(
        "engine id", (1, 2**31 - 1), params, request.seed, -3, None, b"\xff\x00", {0: (4, 5), 2: ()}, tenant="t"
    )


def test_own_resume_log_of_a_request_is_sent_unless_a_newer_one_is_given():
    request = Request("r", (1,), SamplingParams(), resume={0: (7,)})
    assert submit_message(request, 0).resume == {0: (7,)}
    assert submit_message(request, 0, {0: (7, 8)}).resume == {0: (7, 8)}


@pytest.mark.parametrize("params", [{"temperature": 101.0}, {"n": "two"}, [1, 2], {"stop": [""]}])
def test_bad_params_harm_only_their_request(params):
    submit = submit_message(Request("r", (1,), SamplingParams()), 0)
    bad = msgspec.structs.replace(submit, params=msgspec.Raw(msgspec.msgpack.encode(params)))
    arrived = decode_up(encode(bad))
    with pytest.raises(InvalidRequestError):
        submitted_request(arrived, "r")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91\x63",
        b"\x91" * 300_000,
        msgspec.msgpack.encode((3, -1)),
        msgspec.msgpack.encode((3, "x")),
        msgspec.msgpack.encode((3, 1, 2)),
        msgspec.msgpack.encode((1, "r" * 257)),
        msgspec.msgpack.encode((4, 0, MAX_N)),
        encode(submit_message(Request("r", (1,), SamplingParams(), tenant="t" * 257), 0)),
        encode(submit_message(Request("r", (1,), SamplingParams()), 0))[:-1],
        encode(Draining()),
    ],
)
def test_damaged_frames_are_refused(frame):
    with pytest.raises(DamagedMessageError):
        decode_up(frame)


@pytest.mark.parametrize("column", ["streams", "indices", "tokens", "logprobs"])
def test_reports_whose_columns_disagree_are_refused(column):
    frame = msgspec.msgpack.decode(encode(REPORT))
    place = {"streams": 4, "indices": 5, "tokens": 6, "logprobs": 9}[column]
    frame[place] = [[2, -0.25, [5], [-0.25]]] if column == "logprobs" else [1]
    with pytest.raises(DamagedMessageError):
        decode_down(msgspec.msgpack.encode(frame))


@settings(max_examples=300)
@given(st.data())
def test_no_bytes_raise_anything_but_the_typed_error(data):
    frame = bytearray(encode(REPORT))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    for decode in (decode_up, decode_down):
        try:
            decode(frame)
        except DamagedMessageError:
            continue


def test_load_carries_the_engines_figures():
    stats = EngineStats(1, 2, 10, 4, 3, 5, 6, 7, 8, 9, 11)
    load = load_of(stats, 0.25)
    for name in (
        "num_running",
        "num_waiting",
        "kv_blocks_total",
        "outstanding_tokens",
        "generated_tokens",
        "preemptions",
    ):
        assert getattr(load, name) == getattr(stats, name)
    assert load.kv_usage == stats.kv_usage == 0.3
    assert load.progress_age == 0.25


def test_block_keys_fit_the_message():
    assert block_key(b"\xff" * 32) == 2**64 - 1
    assert block_key(b"\x01" + bytes(31)) == 1
