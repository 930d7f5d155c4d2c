"""Deadlines: what waits beyond its own never starts, what runs beyond it ends in one typed error."""

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.deadline import HEADER, LONGEST, before_the_proxy, timeout_of
from cluster.errors import ApiError
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.wire.codec import decode_up, encode
from cluster.wire.router_messages import Submit
from cluster.wire.translation import submit_message, submitted_request
from engine.request import FinishReason
from engine.scheduler.waiting import FEW, Deadlines
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import Driver, expected, request
from tests.fake_source import FakeSource
from tests.grpc_client import Refusal, refusal_of, serving_grpc
from tests.openai_app import MODEL, app_for, client_for, events, served_model

BAD = ["0", "-1", "abc", "", "1e3", "nan", "inf", "1,5", "0.0", "10 s", str(LONGEST + 1), "\u0663"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=100_000)


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


# --- the header


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_header_is_refused_by_name(bad):
    with pytest.raises(ApiError, match=HEADER) as refused:
        timeout_of([bad])
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, HEADER, "invalid_value")


def test_a_header_sent_twice_is_refused():
    with pytest.raises(ApiError, match="2 times"):
        timeout_of(["1", "1"])


@given(st.floats(0.001, LONGEST))
def test_any_number_of_seconds_is_read(seconds):
    text = f"{seconds:.6f}"
    assert timeout_of([text]) == float(text)
    assert 0 < seconds - before_the_proxy(seconds) <= 0.5


# --- the engine


def test_the_engine_computes_nothing_of_what_waited_too_long():
    driver = Driver(max_num_seqs=1)
    driver.core.add(request("runs", 3, max_tokens=10, ignore_eos=True))
    driver.core.add(replace(request("late", 5), deadline=4.0))
    driver.core.add(request("next", 4))
    driver.drain()
    assert driver.reason("late") is FinishReason.ERROR
    assert driver.finished["late", 0].code == "deadline_exceeded"
    assert ("late", 0) not in driver.tokens
    assert driver.tokens["next", 0] == expected(request("next", 4))
    assert driver.core.stats().prompt_tokens == 3 + 4, "its prompt was not computed"


def test_the_engine_ends_what_runs_too_long_and_frees_its_blocks():
    driver = Driver()
    late = replace(request("late", 5, n=3, temperature=1.0, max_tokens=50, ignore_eos=True), deadline=6.5)
    driver.core.add(late)
    driver.core.add(request("other", 4, max_tokens=20, ignore_eos=True))
    driver.drain()
    assert {driver.finished["late", i].code for i in range(3)} == {"deadline_exceeded"}
    assert all(0 < len(driver.tokens["late", i]) <= 6 for i in range(3))
    assert len(driver.tokens["other", 0]) == 20
    stats = driver.core.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


def test_a_request_that_ended_leaves_no_deadline_for_the_next_one_of_its_name():
    driver = Driver()
    driver.core.add(replace(request("name", 3, max_tokens=2, ignore_eos=True), deadline=8.0))
    driver.drain()
    assert driver.finished.pop(("name", 0)).reason is FinishReason.LENGTH
    driver.core.add(replace(request("name", 3, max_tokens=30, ignore_eos=True), deadline=1000.0))
    driver.drain()
    assert driver.now > 8.0
    assert driver.reason("name") is FinishReason.LENGTH
    assert len(driver.tokens["name", 0]) == 2 + 30


def test_deadlines_of_what_ended_long_before_are_forgotten():
    live = []
    deadlines = Deadlines(lambda name, number: (name, number) in live)
    for number in range(2000):
        live = [(f"r{i}", 3 * number + i) for i in range(3)]
        for one in live:
            deadlines.watch(1e6 - number, *one)
    assert len(deadlines) <= 2 * len(live) + FEW
    assert deadlines.take_passed(1e9) == [name for name, _ in live]


# --- between router and replica


def test_only_the_time_that_is_left_travels():
    sent = submit_message(replace(request("r", 3), deadline=1000.5), 7, now=998.0)
    told = decode_up(encode(sent))
    assert isinstance(told, Submit)
    assert told.timeout == 2.5
    assert submitted_request(told, "r@1.7", now=50.0).deadline == 52.5
    late = submit_message(replace(request("r", 3), deadline=10.0), 7, now=998.0)
    assert late.timeout == 0.0
    assert submitted_request(submit_message(request("r", 3), 7), "r@1.7", now=50.0).deadline is None


async def test_a_request_that_runs_too_long_ends_in_one_error_and_its_blocks_are_free():
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.005)
        one = replace(request("r", 5, max_tokens=120, ignore_eos=True), deadline=soon(0.2))
        with pytest.raises(ApiError) as ended:
            await lab.collect(one)
        assert (ended.value.code, ended.value.status, ended.value.retryable) == ("deadline_exceeded", 504, False)
        steps = replica.executor.executed
        await replica.until_stats(lambda stats: stats.num_running == 0)
        assert replica.executor.executed <= steps + 2
        assert replica.held_blocks == 0
        assert lab.dispatcher.counters.outcomes == {"deadline_exceeded": 1}


async def test_one_that_waits_in_a_replica_beyond_its_deadline_is_never_computed():
    async with Lab(max_num_seqs=1) as lab:
        replica = await lab.start("a", pace=0.005)
        first = asyncio.create_task(lab.collect(request("first", 5, max_tokens=100, ignore_eos=True)))
        await replica.until_stats(lambda stats: stats.num_running == 1)
        with pytest.raises(ApiError, match="deadline"):
            await lab.collect(replace(request("late", 7), deadline=soon(0.1)))
        await first
        assert replica.core.stats.prompt_tokens == 5


async def test_a_request_without_time_is_not_even_sent():
    async with Lab() as lab:
        replica = await lab.start("a")
        with pytest.raises(ApiError, match="before it could start"):
            await lab.collect(replace(request("r", 3), deadline=soon(-1)))
        assert (replica.executor.executed, lab.dispatcher.num_live) == (0, 0)


async def test_the_time_that_is_left_goes_along_with_a_migration():
    async with Lab() as lab:
        await lab.start("a", steps=3)
        one = replace(request("r", 5, max_tokens=100, ignore_eos=True), deadline=soon(0.6))
        task = asyncio.create_task(lab.collect(one))
        await until(lambda: lab.dispatcher.counters.tokens >= 2)
        await lab.start("b", pace=0.02)
        lab.kill("a")
        with pytest.raises(ApiError, match="deadline"):
            await task
        assert lab.dispatcher.counters.migrations == 1
        assert lab.dispatcher.counters.tokens > 3, "it went on before its time was over"


async def test_a_deadline_passes_while_no_replica_is_there():
    async with Lab() as lab:
        with pytest.raises(ApiError) as ended:
            await lab.collect(replace(request("r", 3), deadline=soon(0.05)))
        assert ended.value.code == "deadline_exceeded"


async def test_a_jump_of_the_wall_clock_ends_nothing_and_delays_nothing(monkeypatch):
    async with Lab() as lab:
        await lab.start("a", pace=0.002)
        real = time.time
        for jump in (86_400.0, -86_400.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            one = replace(request(f"r{jump}", 5, max_tokens=20, ignore_eos=True), deadline=soon(30))
            assert len((await lab.collect(one))[0]) == 20
            with pytest.raises(ApiError, match="deadline"):
                await lab.collect(
                    replace(request(f"l{jump}", 5, max_tokens=120, ignore_eos=True), deadline=soon(0.05))
                )


# --- the admission


async def test_one_whose_deadline_passes_in_the_queue_never_starts():
    source = FakeSource(lambda *_: range(1000), hold=1)
    admission = AdmissionQueue(source, lambda: 1)
    async with aclosing(admission.generate("a", request("1", 3, max_tokens=9))) as first:
        await anext(first)
        async with aclosing(admission.generate("a", replace(request("2", 3), deadline=soon(0.02)))) as second:
            with pytest.raises(ApiError, match="waited for its turn") as ended:
                await anext(second)
        assert ended.value.code == "deadline_exceeded"
        assert [one.request_id for one in source.requests] == ["1"]
        assert admission.num_waiting == 0
    assert admission.num_inside == 0


# --- the front ends


class Slow(FakeSource):
    """Ends requests as a dispatcher does: when their deadline passes."""

    async def _pause(self) -> None:
        deadline = self.requests[-1].deadline
        assert deadline is not None, "the deadline was lost on the way"
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        raise ApiError("deadline_exceeded", "the request's deadline passed")


def slow(hold: int) -> Slow:
    return Slow(lambda *_: range(5, 1000), hold=hold)


BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 50},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 50},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_is_late_is_a_typed_504(path, model):
    async with client_for(app_for(slow(3), model)) as client:
        late = await client.post(path, json=BODIES[path], headers={HEADER: "0.1"})
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    error = late.json()["error"]
    assert (error["code"], error["type"], error["retryable"]) == ("deadline_exceeded", "server_error", False)
    assert error["request_id"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_late_ends_in_an_error_event(path, model):
    async with client_for(app_for(slow(3), model)) as client:
        late = await client.post(path, json=BODIES[path] | {"stream": True}, headers={HEADER: "0.1"})
    assert late.status_code == 200
    assert "deadline_exceeded" in late.text
    assert "[DONE]" not in late.text
    if path != "/v1/responses":
        assert events(late.text)[-1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings", "/tokenize"])
async def test_a_bad_header_is_a_400_on_every_route_that_works(path, model):
    source = slow(3)
    async with client_for(app_for(source, model)) as client:
        refused = await client.post(path, json=BODIES.get(path, {}), headers={HEADER: "soon"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == HEADER
    assert not source.requests


async def test_a_body_that_dawdles_beyond_the_deadline_is_a_504(model):
    app = app_for(slow(3), model)
    sent = []

    async def receive():
        await asyncio.sleep(30)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (HEADER.encode(), b"0.05")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    assert sent[0]["status"] == 504
    assert json.loads(sent[1]["body"])["error"]["code"] == "deadline_exceeded"


async def test_a_grpc_deadline_and_the_header_both_hold(model):
    ask = pb.GenerateRequest(model=MODEL, prompt="hi", sampling=pb.Sampling(max_tokens=50, ignore_eos=True))
    source = slow(3)
    admission = AdmissionQueue(source, lambda: 8)
    async with serving_grpc(source, model, admission=admission) as served:
        late = await refusal_of(served.stub.Generate(ask, timeout=30, metadata=[(HEADER, "0.1")]))
        assert isinstance(late, Refusal)
        assert (late.status, late.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
        with pytest.raises(grpc.RpcError) as ended:
            call = served.stub.Generate(ask, timeout=0.1)
            while await call.read() is not grpc.aio.EOF:
                continue
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        bad = await refusal_of(served.stub.Generate(ask, metadata=[(HEADER, "never")]))
        assert (bad.status, bad.param) == (grpc.StatusCode.INVALID_ARGUMENT, HEADER)
        await until(lambda: admission.num_inside == 0)
        assert len(source.closed) == 2
