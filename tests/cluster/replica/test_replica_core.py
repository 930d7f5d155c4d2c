"""The replica without Ray: routers apart from each other, idempotent orders, freed blocks, drains, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from cluster.replica import core
from cluster.replica.runs import RouterSession
from cluster.replica.sessions import CachedBlocks, ReplicaTimes
from cluster.telemetry.step_metrics import StepMetrics, StepSpeed
from cluster.wire.codec import Down
from cluster.wire.link import DAMAGED, ENGINE_DEAD, LOST, SUPERSEDED, LinkClosedError, LinkRefusedError, ReplicaLink
from cluster.wire.parts import TraceContext
from cluster.wire.replica_messages import Draining, Heartbeat, Rejected, Report
from cluster.wire.router_messages import Abort, Explain, FinishChoice, Hello, Ping, Resync
from cluster.wire.translation import submit_message
from tests.cluster.cluster_lab import GatedExecutor, LabReplica, until
from tests.engine.engine_driver import expected, long_request, request
from tests.simulator.links import connect_local

Start = Callable[..., Awaitable[LabReplica]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a replica that may run `steps` steps and dies of the token `poison`."""
    replicas: list[LabReplica] = []

    async def started(
        steps: int = 10**6, times: ReplicaTimes | None = None, poison: int | None = None, spans: Any = None
    ) -> LabReplica:
        executor = GatedExecutor(256, steps, poison)
        replicas.append(LabReplica("a", executor, 256, times or ReplicaTimes(heartbeat=60.0), spans=spans))
        return replicas[-1]

    yield started
    for replica in replicas:
        replica.executor.close()
        await replica.core.close()


async def open_link(replica: LabReplica, router: str = "router") -> ReplicaLink:
    return await connect_local(replica.core.serve, router)


async def receive(link: ReplicaLink, kind: type[Down], wanted: Callable[[Any], bool] = lambda _: True) -> Any:
    """Return the next message of a kind."""
    async with asyncio.timeout(10):
        while True:
            message = await link.receive()
            if isinstance(message, kind) and wanted(message):
                return message


async def tokens_of(link: ReplicaLink, keys: set[int]) -> dict[int, list[int]]:
    """Return the tokens of these streams, all to their end."""
    tokens: dict[int, list[int]] = {key: [] for key in keys}
    open_keys = set(keys)
    while open_keys:
        report = await receive(link, Report)
        for key, index, token in zip(report.streams, report.indices, report.tokens, strict=True):
            assert index == len(tokens[key]), "positions must be dense"
            tokens[key].append(token)
        for row in report.finishes:
            assert row.num_tokens == len(tokens[row.stream])
            open_keys.remove(row.stream)
    return tokens


async def test_routers_with_equal_request_ids_do_not_meet(start):
    replica = await start()
    links = [await open_link(replica, name) for name in ("x", "y")]
    for seed, link in enumerate(links):
        link.send(submit_message(request("same", 5, seed=seed, temperature=1.0), 16))
    for seed, link in enumerate(links):
        assert await tokens_of(link, {16}) == {16: expected(request("same", 5, seed=seed, temperature=1.0))}


async def test_each_router_gets_one_report_per_step_with_all_its_tokens(start):
    replica = await start(steps=0)
    links = [await open_link(replica, name) for name in ("x", "y")]
    for link in links:
        for i in range(3):
            link.send(submit_message(long_request(f"r{i}", seed=i), 16 * i))
    await replica.until_stats(lambda _: replica.core.num_requests == 6)
    replica.executor.allow(100)
    for link in links:
        first = await receive(link, Report, lambda report: len(report.tokens) == 3)
        second = await receive(link, Report)
        assert sorted(first.streams) == [0, 16, 32]
        assert (second.sequence, second.step) == (first.sequence + 1, first.step + 1)
        assert second.incarnation == replica.core.incarnation


async def test_submit_said_twice_runs_once_even_after_its_end(start):
    replica = await start()
    link = await open_link(replica)
    submit = submit_message(long_request("r"), 16)
    link.send(submit)
    link.send(submit)
    assert await tokens_of(link, {16}) == {16: expected(long_request("r"))}
    link.send(submit)
    link.send(submit_message(long_request("other"), 32))
    assert await tokens_of(link, {32}) == {32: expected(long_request("other"))}
    assert replica.core.stats.generated_tokens == 60


async def test_submit_that_its_router_has_given_up_never_runs(start):
    """Late on a link that does not keep its order: the router was told that it is not here, and runs it elsewhere."""
    replica = await start(times=ReplicaTimes(heartbeat=0.02))
    link = await open_link(replica)
    link.send(Ping(submitted=32))
    assert (await receive(link, Heartbeat, lambda beat: beat.submitted)).submitted == 32
    link.send(submit_message(long_request("late"), 16))
    link.send(submit_message(long_request("r"), 32))
    assert await tokens_of(link, {32}) == {32: expected(long_request("r"))}
    assert replica.core.stats.generated_tokens == 30


async def test_heartbeats_tell_what_runs_also_where_reports_flow(start):
    replica = await start(steps=0, times=ReplicaTimes(heartbeat=0.02))
    link = await open_link(replica)
    for stream, n in ((16, 1), (32, 3)):
        link.send(submit_message(long_request(f"r{stream}", n=n), stream))
    beat = await receive(link, Heartbeat, lambda beat: beat.submitted == 33)
    assert beat.running == [16, 32, 33, 34]
    steps = asyncio.create_task(keep_stepping(replica))
    for _ in range(2):  # between reports that come all the time
        await receive(link, Report, lambda report: bool(report.tokens))
        await receive(link, Heartbeat)
    assert replica.core.num_requests == 2, "it was idle"
    steps.cancel()


async def keep_stepping(replica: LabReplica) -> None:
    while True:
        replica.executor.allow(1)
        await asyncio.sleep(0.005)


async def test_abort_said_twice_or_of_the_unknown_harms_nobody(start):
    replica = await start(steps=3)
    link = await open_link(replica)
    link.send(submit_message(long_request("r"), 16))
    link.send(submit_message(long_request("other"), 32))
    for message in (Abort(16), Abort(16), Abort(999), FinishChoice(999, 0), FinishChoice(32, 5)):
        link.send(message)
    await until(lambda: replica.core.num_requests == 1)
    replica.executor.allow(100)
    assert await tokens_of(link, {32}) == {32: expected(long_request("other"))}


async def test_blocks_of_a_router_that_left_are_free_within_two_steps(start):
    replica = await start(steps=4)
    gone, stays = await open_link(replica, "gone"), await open_link(replica, "stays")
    for i in range(5):
        gone.send(submit_message(long_request(f"r{i}"), 16 * i))
    stays.send(submit_message(long_request("r"), 16))
    await until(lambda: replica.executor.executed == 4)
    gone.close(LOST)
    await until(lambda: replica.core.num_requests == 1)
    replica.executor.allow(2)
    await replica.until_stats(lambda stats: stats.num_running == 1 and stats.num_waiting == 0)
    assert replica.executor.executed <= 6
    replica.executor.allow(100)
    assert await tokens_of(stays, {16}) == {16: expected(long_request("r"))}
    assert replica.held_blocks == 0


async def test_finished_choice_ends_and_its_siblings_go_on(start):
    replica = await start(steps=4)
    link = await open_link(replica)
    r = long_request("r", n=3)
    link.send(submit_message(r, 16))
    tokens: dict[int, list[int]] = {16: [], 17: [], 18: []}
    ended: set[int] = set()
    while ended != {16, 18}:
        report = await receive(link, Report)
        for key, token in zip(report.streams, report.tokens, strict=True):
            tokens[key].append(token)
        if 17 in report.streams and len(tokens[17]) == 4:
            link.send(FinishChoice(16, 1))
            await until(lambda: len(replica.core._runs.get("r@1.16").lanes) == 2)
            replica.executor.allow(100)
        ended |= {row.stream for row in report.finishes}
    assert tokens[16] == expected(r, 0)
    assert tokens[18] == expected(r, 2)
    assert tokens[17] == expected(r, 1)[: len(tokens[17])]
    assert len(tokens[17]) < 10


async def test_resumed_request_goes_on_at_the_next_position_with_the_choices_it_names(start):
    replica = await start()
    link = await open_link(replica)
    r = long_request("r", n=3)
    logs = {0: tuple(expected(r, 0)[:7]), 2: ()}
    link.send(submit_message(r, 16, logs))
    reports = [await receive(link, Report, lambda report: bool(report.tokens))]
    while len(reports[-1].finishes) == 0 or reports[-1].finishes[-1].stream != 18:
        reports.append(await receive(link, Report))
    rows = [row for report in reports for row in zip(report.streams, report.indices, report.tokens, strict=True)]
    assert [(i, t) for s, i, t in rows if s == 16] == list(enumerate(expected(r, 0)))[7:]
    assert [(i, t) for s, i, t in rows if s == 18] == list(enumerate(expected(r, 2)))
    assert {s for s, _, _ in rows} == {16, 18}


async def test_refusal_reaches_only_who_asked(start):
    replica = await start()
    link = await open_link(replica)
    link.send(submit_message(request("long", 500), 16))
    rejected = await receive(link, Rejected)
    assert (rejected.stream, rejected.code) == (16, "context_length_exceeded")
    link.send(submit_message(request("r", 5), 32))
    assert await tokens_of(link, {32}) == {32: expected(request("r", 5))}
    assert replica.core.num_requests == 0


WORDS = "what a prompt says"


def fails_at(method: Callable[..., Any], wanted: Callable[..., bool]) -> Callable[..., Any]:
    """Return what does the same as `method`, but for calls that are `wanted`: these raise what nobody expects."""

    def call(*args: Any) -> Any:
        if wanted(*args):
            raise KeyError(WORDS)
        return method(*args)

    return call


@pytest.mark.parametrize("where", ["early", "late"])
async def test_submit_that_cannot_be_handled_is_refused_and_nothing_of_it_stays(start, where, monkeypatch, caplog):
    replica = await start(steps=3)
    if where == "early":
        bad = fails_at(core.submitted_request, lambda submit, *_: submit.stream == 32)
        monkeypatch.setattr(core, "submitted_request", bad)
    else:  # the engine has it already
        add = replica.core._engine.add
        check = fails_at(lambda _: None, lambda one: one.request_id.startswith("bad@"))
        monkeypatch.setattr(replica.core._engine, "add", lambda one: (add(one), check(one)))
    link = await open_link(replica)
    link.send(submit_message(long_request("good"), 16))
    link.send(submit_message(long_request("bad"), 32))
    rejected = await receive(link, Rejected)
    assert (rejected.stream, rejected.code) == (32, "internal_error")
    assert replica.core.num_requests == 1
    replica.executor.allow(100)
    assert await tokens_of(link, {16}) == {16: expected(long_request("good"))}
    await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
    assert replica.held_blocks == 0
    assert "a Submit of router router could not be handled" in caplog.text
    assert WORDS not in rejected.message + caplog.text


UNREADABLE = {
    "too deep": {"params": msgspec.Raw(b"\x81\xa1x" + b"\x91" * 5000 + b"\x00")},
    "a name that is too long": {"tenant": "t" * 300},
    "not a number": {"timeout": float("nan")},
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_submit_that_cannot_be_read_is_refused_and_the_link_goes_on(start, what):
    replica = await start()
    link = await open_link(replica)
    link.send(msgspec.structs.replace(submit_message(long_request("bad"), 16 * 300), **UNREADABLE[what]))
    link.send(submit_message(long_request("good"), 16 * 301))
    rejected = await receive(link, Rejected)
    assert (rejected.stream, rejected.code) == (16 * 300, "internal_error")
    assert await tokens_of(link, {16 * 301}) == {16 * 301: expected(long_request("good"))}


@pytest.mark.parametrize("message", [Abort(16), FinishChoice(16, 0), Explain(1, "r", None), Resync()], ids=repr)
async def test_other_messages_that_cannot_be_handled_harm_no_link(start, message, monkeypatch):
    replica = await start(steps=2)
    link = await open_link(replica)
    link.send(submit_message(long_request("r"), 16))
    await until(lambda: replica.core.num_requests == 1)
    broken = fails_at(replica.core._handle, lambda _, said: said == message)
    monkeypatch.setattr(replica.core, "_handle", broken)
    link.send(message)
    link.send(submit_message(long_request("other"), 32))
    replica.executor.allow(100)
    assert await tokens_of(link, {16, 32}) == {key: expected(long_request("r")) for key in (16, 32)}


async def test_rows_that_cannot_be_told_end_their_request_alone(start, monkeypatch):
    replica = await start(steps=0)
    links = [await open_link(replica, name) for name in ("x", "y")]
    for link in links:
        link.send(submit_message(long_request("good"), 16))
    links[0].send(submit_message(long_request("bad", logprobs=1, n=2), 32))
    await until(lambda: replica.core.num_requests == 3)
    broken = fails_at(RouterSession.add_logprobs, lambda session, _: session.indices[-1] == 4)
    monkeypatch.setattr(RouterSession, "add_logprobs", broken)
    replica.executor.allow(100)
    ends = []
    while {row.stream for row in ends} != {32, 33}:
        ends += [row for row in (await receive(links[0], Report)).finishes if row.stream in (32, 33)]
    assert {(row.reason, row.code) for row in ends} == {("error", "")}
    for link in links:
        await until(lambda: replica.core.num_requests == 0)
        assert not link.closed
    await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
    assert replica.held_blocks == 0


async def test_report_that_cannot_be_sent_ends_one_link_and_not_the_engine(start, monkeypatch):
    replica = await start(steps=0)
    links = [await open_link(replica, name) for name in ("x", "y")]
    for link in links:
        link.send(submit_message(long_request("r"), 16))
    await until(lambda: replica.core.num_requests == 2)
    broken = fails_at(RouterSession.flush, lambda session, *_: session.link.router_id == "x")
    monkeypatch.setattr(RouterSession, "flush", broken)
    replica.executor.allow(100)
    with pytest.raises(LinkClosedError) as caught:
        await receive(links[0], Report)
    assert caught.value.code == DAMAGED
    assert await tokens_of(links[1], {16}) == {16: expected(long_request("r"))}
    assert replica.core.dead_reason is None


class BrokenSpans:
    """Tracing that fails whatever it is told."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return fails_at(lambda *_: None, lambda *_: name != "abandon")


async def test_figures_and_spans_that_fail_cost_no_token(start, monkeypatch):
    replica = await start(spans=BrokenSpans())
    for owner, name in ((StepMetrics, "note"), (StepSpeed, "note"), (CachedBlocks, "note")):
        monkeypatch.setattr(owner, name, fails_at(lambda *_: None, lambda *_: True))
    link = await open_link(replica)
    traced = TraceContext("00-11111111111111111111111111111111-2222222222222222-01")
    link.send(submit_message(long_request("r"), 16, trace=traced))
    assert await tokens_of(link, {16}) == {16: expected(long_request("r"))}
    link.send(submit_message(request("long", 500), 32, trace=traced))
    assert (await receive(link, Rejected)).code == "context_length_exceeded"


async def test_replica_that_is_to_go_tells_so_and_finishes_what_it_has_and_what_crosses_the_news(start):
    replica = await start(steps=2)
    link = await open_link(replica)
    link.send(submit_message(long_request("old"), 16))
    await until(lambda: replica.core.num_requests == 1)
    replica.core.drain()
    assert not (await receive(link, Draining)).hand_over
    link.send(submit_message(long_request("new"), 32))
    await until(lambda: replica.core.num_requests == 2)
    drained = asyncio.create_task(replica.core.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    replica.executor.allow(100)
    await asyncio.wait_for(drained, 10)
    assert (await open_link(replica, "late")).welcome.draining
    replica.core.drain(hand_over=True)
    assert (await receive(link, Draining)).hand_over


async def test_new_link_of_a_router_takes_the_place_of_the_old_one(start):
    replica = await start(steps=2)
    old = await open_link(replica)
    old.send(submit_message(long_request("r"), 16))
    await until(lambda: replica.core.num_requests == 1)
    new = await open_link(replica)
    assert replica.core.num_requests == 0
    with pytest.raises(LinkClosedError) as caught:
        await receive(old, Hello)
    assert caught.value.code == SUPERSEDED
    new.send(submit_message(long_request("r"), 32))
    replica.executor.allow(100)
    assert await tokens_of(new, {32}) == {32: expected(long_request("r"))}


async def test_a_router_has_left_when_its_link_is_over_or_never_came(start):
    replica = await start()
    link = await open_link(replica)
    left = asyncio.create_task(replica.core.until_left("router", patience=0.01))
    await asyncio.wait_for(replica.core.until_left("nobody", patience=0.02), 10)
    assert not left.done(), "its link still holds"
    link.close()
    await asyncio.wait_for(left, 10)


async def test_death_of_the_engine_is_told_to_all_routers_with_its_reason(start):
    reasons: list[str] = []
    replica = await start(poison=60)
    replica.core._on_dead = reasons.append
    links = [await open_link(replica, name) for name in ("x", "y")]
    links[0].send(submit_message(request("p", (1, 2, 60)), 16))
    for link in links:
        with pytest.raises(LinkClosedError, match="poisoned") as caught:
            await receive(link, Hello)
        assert caught.value.code == ENGINE_DEAD
    assert len(reasons) == 1
    assert not replica.core.is_healthy(1000.0)
    with pytest.raises(LinkRefusedError, match="poisoned"):
        await open_link(replica, "late")
    replica.core.on_dead("said again")
    assert len(reasons) == 1


async def test_idle_replica_says_that_it_is_alive_with_its_load(start):
    replica = await start(times=ReplicaTimes(heartbeat=0.02))
    link = await open_link(replica)
    beat = await receive(link, Heartbeat)
    assert beat.incarnation == replica.core.incarnation
    assert beat.load.kv_blocks_total == 255
    assert beat.load.progress_age < 5
    assert replica.core.is_healthy(5.0)


async def test_router_that_fell_silent_is_given_up(start):
    replica = await start(steps=2, times=ReplicaTimes(heartbeat=0.02, router_timeout=0.2))
    silent, speaking = await open_link(replica, "silent"), await open_link(replica, "speaking")
    silent.send(submit_message(long_request("r"), 16))
    speaking.send(submit_message(long_request("r"), 16))
    async with asyncio.timeout(10):
        while replica.core.num_requests == 2 or not silent.closed:
            speaking.send(Ping())
            await asyncio.sleep(0.01)
    assert not speaking.closed
    assert replica.core.num_requests == 1


async def test_late_router_gets_the_cached_blocks_first(start):
    replica = await start()
    first = await open_link(replica, "first")
    first.send(submit_message(request("r", 21), 16))
    await tokens_of(first, {16})
    late = await open_link(replica, "late")
    snapshot = await receive(late, Report)
    assert snapshot.sequence == snapshot.blocks.sequence == 0
    assert snapshot.blocks.cleared
    assert len(snapshot.blocks.stored) >= 5


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left_after_any_order_of_submits_aborts_and_losses(start, seed):
    rng = Random(seed)
    replica = await start()
    links: list[ReplicaLink] = [await open_link(replica, f"router{i}") for i in range(3)]
    stream = 0
    for _ in range(200):
        place = rng.randrange(3)
        stream += 16
        match rng.choice(["submit", "submit", "submit", "abort", "finish", "lose"]):
            case "submit":
                params = {"n": rng.choice([1, 1, 4]), "max_tokens": rng.randrange(1, 40)}
                links[place].send(submit_message(long_request(f"r{stream}", **params), stream))
            case "abort":
                links[place].send(Abort(16 * rng.randrange(stream // 16 + 1)))
            case "finish":
                links[place].send(FinishChoice(16 * rng.randrange(stream // 16 + 1), rng.randrange(4)))
            case "lose" if rng.random() < 0.2:
                links[place].close(LOST)
                links[place] = await open_link(replica, f"router{place}")
        if rng.random() < 0.2:
            await asyncio.sleep(0.002)
    await asyncio.wait_for(replica.core.drained(), 20)
    await replica.until_stats(lambda stats: stats.num_running + stats.num_waiting == 0)
    assert replica.held_blocks == 0
    assert replica.core.num_requests == len(replica.core._runs._lanes) == 0
