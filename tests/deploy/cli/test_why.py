"""`squadron why`: what a request waited for, whichever router is asked, while it waits and afterwards."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.text import Text

from cluster.accounts.flight_recorder import FlightRecorder, Wait
from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.config import ClusterConfig
from cluster.errors import ApiError
from cluster.http.app import build_app
from cluster.replica.host import MOST_DUMPS, ReplicaHost, dump_flight, log_folder
from cluster.replica.worker_group import start_group
from cluster.router.live_model import admission_queue
from cluster.router.models import Models
from cluster.router.why import PATIENCE, Inquiries, explanation
from cluster.telemetry.metrics import Metrics
from cluster.wire.parts import Waited
from cluster.wire.replica_messages import Explained
from deploy.cli.why import FOUND, KEY_REFUSED, NOTHING, UNREACHABLE, show_why
from deploy.demo import demo_model_path
from tests.cluster.cluster_lab import Lab, long_request, until
from tests.openai_app import client_for, front_for, served_model


def kinds(told) -> list[tuple[str, str]]:
    return [(one.event.what.value, one.replica) for one in told.events]


async def drain(chunks) -> None:
    async for _ in chunks:
        pass


async def test_request_that_did_not_wait_is_not_known():
    async with Lab() as lab:
        await lab.start("a")
        await lab.collect(long_request("r"))
        assert (await lab.dispatcher.explain("r")).events == ()


async def test_wait_for_a_first_replica_and_a_migration_are_told_by_any_router():
    async with Lab() as lab, Lab() as other:
        task = asyncio.create_task(lab.collect(long_request("r")))
        await until(lambda: lab.dispatcher.queue().requests == 1)
        assert kinds(await lab.dispatcher.explain("r")) == [("replica", "")]
        assert lab.dispatcher.num_waiting == 1
        first = await lab.start("a", steps=3)
        await until(lambda: first.executor.executed >= 3)
        second = await lab.start("b", steps=3)
        lab.kill("a")
        await until(lambda: second.executor.executed >= 3)
        other.dispatcher.add_link(await second.link("other"))
        story = [("replica", ""), ("sent", ""), ("migration", "")]
        assert kinds(await lab.dispatcher.explain("r")) == [*story, ("sent", "")]
        assert kinds(await other.dispatcher.explain("r")) == story, "the second replica was told what went before"
        second.executor.allow(1000)
        await task
        found = await lab.dispatcher.explain("r")
        assert kinds(found)[:4] == [*story, ("sent", "")]
        assert {("done", ""), ("ended", "b")} == set(kinds(found)[4:])
        assert "lost" in found.events[2].event.detail


async def test_queue_of_a_replica_is_told():
    async with Lab(max_num_seqs=1) as lab:
        replica = await lab.start("a", steps=2)
        tasks = [asyncio.create_task(lab.collect(long_request(name))) for name in ("first", "second", "third")]
        await until(lambda: replica.executor.executed >= 2)
        assert kinds(await lab.dispatcher.explain("second")) == [("slots", "a")]
        assert kinds(await lab.dispatcher.explain("third")) == [("queue", "a")]
        replica.executor.allow(1000)
        await asyncio.gather(*tasks)
        assert kinds(await lab.dispatcher.explain("second")) == [("slots", "a"), ("runs", "a"), ("ended", "a")]


async def test_turn_of_a_tenant_is_told_while_it_lasts_and_afterwards(tmp_path):
    model = served_model(tmp_path)
    async with Lab() as lab:
        replica = await lab.start("a", steps=2)
        admission = AdmissionQueue(lab.dispatcher, lambda: 1)

        async def ask(name: str) -> None:
            async with await Tenancy().visit(Tenant("team")) as visit:
                visit.ask("m", admission)
                await drain(visit.source.generate(long_request(name)))

        tasks = [asyncio.create_task(ask(name)) for name in ("cmpl-1", "cmpl-2")]
        await until(lambda: admission.num_waiting == 1)
        metrics = Metrics()
        front = front_for(lab.dispatcher, model, metrics, admission, ask_router=lab.dispatcher.explain)
        async with client_for(build_app(Models([front]), metrics, dict)) as client:
            told = (await client.get("/why/cmpl-2")).json()
            assert [event["what"] for event in told["events"]] == ["turn"]
            assert "tenant team" in told["events"][0]["detail"]
            replica.executor.allow(1000)
            await asyncio.gather(*tasks)
            told = (await client.get("/why/cmpl-2")).json()
            assert [event["what"] for event in told["events"]] == ["turn", "let_in", "sent", "ended", "done"]
            assert told["silent"] == []
            unknown = await client.get("/why/cmpl-3")
            assert unknown.status_code == 404
            assert "nothing is known of 'cmpl-3'" in unknown.json()["error"]["message"]
            assert "the `id` of their answer, such as chatcmpl-" in unknown.json()["error"]["message"]
            assert (await client.get("/why/" + "x" * 300)).status_code == 400


async def test_those_that_waited_in_line_in_vain_are_told_of():
    async with Lab() as lab:
        replica = await lab.start("a", steps=2)
        admission = admission_queue(ClusterConfig(model="m", max_inflight=1, max_queue_wait=0.2), lab.dispatcher)

        async def ask(name: str) -> None:
            await drain(admission.generate("team", replace(long_request(name), tenant="team")))

        first = asyncio.create_task(ask("cmpl-1"))
        await until(lambda: admission.num_inside == 1)
        patient, gone = (asyncio.create_task(ask(name)) for name in ("cmpl-2", "cmpl-3"))
        await until(lambda: admission.num_waiting == 2)
        gone.cancel()
        with pytest.raises(ApiError, match="waited"):
            await patient
        for name, end in (("cmpl-2", "overloaded"), ("cmpl-3", "aborted")):
            turn, done = (await lab.dispatcher.explain(name, "team")).events
            assert (turn.event.what, done.event.what, done.event.detail) == (Wait.TURN, Wait.DONE, end)
        assert (await lab.dispatcher.explain("cmpl-2", "other")).events == ()
        replica.executor.allow(1000)
        await first


async def test_only_its_own_tenant_and_whoever_runs_the_server_are_told(tmp_path):
    keys = FixedKeys(
        KeyRing(
            [
                KeyEntry(hash_key("k-a"), Tenant("a")),
                KeyEntry(hash_key("k-b"), Tenant("b")),
                KeyEntry(hash_key("k-ops"), Tenant("b", sees_all=True)),
            ]
        )
    )
    tenancy = Tenancy(keys)
    async with Lab(max_num_seqs=1) as lab:
        replica = await lab.start("a", steps=2)
        admission = AdmissionQueue(lab.dispatcher, lambda: 2)

        async def ask(name: str) -> None:
            async with await tenancy.visit(Tenant("a")) as visit:
                visit.ask("m", admission)
                await drain(visit.source.generate(long_request(name)))

        tasks = [asyncio.create_task(ask(f"cmpl-{name}")) for name in ("f1", "f2", "f3")]
        await until(lambda: admission.num_waiting == 1 and replica.executor.executed >= 2)
        metrics = Metrics()
        front = front_for(
            lab.dispatcher, served_model(tmp_path), metrics, admission, ask_router=lab.dispatcher.explain
        )
        async with client_for(build_app(Models([front]), metrics, dict, tenancy=tenancy)) as client:

            async def status(name: str, key: str) -> int:
                answer = await client.get(f"/why/{name}", headers={"authorization": f"Bearer {key}"})
                return answer.status_code

            in_queue_of_the_replica, in_line = "cmpl-f2", "cmpl-f3"
            for name in (in_queue_of_the_replica, in_line):
                assert [await status(name, key) for key in ("k-a", "k-b", "k-ops", "k-c")] == [200, 404, 200, 401]
            assert await status("cmpl", "k-ops") == 404, "no names, no stories"
            ahead = {}
            for key in ("k-a", "k-ops"):
                answer = await client.get(f"/why/{in_line}", headers={"authorization": f"Bearer {key}"})
                ahead[key] = [one["detail"] for one in answer.json()["events"] if one["what"] == "turn"]
            assert "tokens of work" in ahead["k-ops"][0]
            assert ahead["k-a"] == [""], "others' work is counted in it, to the token"
            replica.executor.allow(1000)
            await asyncio.gather(*tasks)
            assert [await status(in_line, key) for key in ("k-a", "k-b")] == [200, 404]


async def test_replica_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("cluster.router.why.PATIENCE", 0.05)
    async with Lab() as lab:
        await lab.start("a")
        monkeypatch.setattr("cluster.router.why.Inquiries.on_answer", lambda *_: None)
        assert (await lab.dispatcher.explain("r")).silent == ("a",)


async def test_late_answers_are_nobodys():
    class Someone:
        replica_id = "a"

    inquiries = Inquiries(lambda *_: None)
    inquiries.on_answer(Someone(), Explained(7, []))
    assert PATIENCE > 0


def test_story_of_the_last_attempt_counts_where_the_router_knows_nothing():
    before, lost = Waited(9.0, Wait.TURN), Waited(5.0, Wait.MIGRATION)
    told = explanation([], {"a": [before], "b": [before, lost, Waited(4.0, Wait.BLOCKS)], "c": None})
    assert kinds(told) == [("turn", ""), ("migration", ""), ("blocks", "b")]
    assert told.silent == ("c",)


BODY = {
    "id": "cmpl-1",
    "silent": ["c"],
    "events": [
        {"at": 1000.0, "age": 5.0, "what": "turn", "detail": "of tenant t", "replica": ""},
        {"at": 1001.5, "age": 3.5, "what": "blocks", "detail": "", "replica": "a"},
    ],
}


def answering(monkeypatch, status: int, body) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
    monkeypatch.setattr(
        "deploy.cli.why.client_for", lambda url, key: httpx.Client(base_url=url, transport=transport, timeout=5.0)
    )


def test_command_prints_one_line_for_each_wait(monkeypatch, capsys):
    answering(monkeypatch, 200, BODY)
    assert show_why("127.0.0.1:8000", None, "cmpl-1", as_json=False) == FOUND
    found, first, second = capsys.readouterr().out.splitlines()
    assert found == 'found cmpl-1 http://127.0.0.1:8000 notice="no answer from c: there may be more"'
    assert first.startswith("wait router from=")
    assert first.endswith(' for=1.500s what="waits for its tenant\'s turn: of tenant t"')
    assert second.endswith('what="waits for KV blocks"')
    assert second.startswith("wait a from=")
    assert "for=" not in second


def test_command_shows_the_same_on_a_terminal_as_status_does(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    answering(monkeypatch, 200, BODY)
    assert show_why("127.0.0.1:8000", None, "cmpl-1", as_json=False) == FOUND
    printed = [line.rstrip() for line in Text.from_ansi(capsys.readouterr().out).plain.splitlines()]
    assert printed[0] == "FOUND  cmpl-1  http://127.0.0.1:8000"
    assert printed[1].split() == ["From", "For", "At"]
    assert printed[2].endswith("1.500 s  router  waits for its tenant's turn: of tenant t")
    assert printed[-1] == "no answer from c: there may be more"


def test_command_prints_json(monkeypatch, capsys):
    answering(monkeypatch, 200, BODY)
    assert show_why("127.0.0.1:8000", None, "cmpl-1", as_json=True) == FOUND
    assert json.loads(capsys.readouterr().out) == BODY


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (404, {"error": {"message": "nothing is known of 'x'"}}, NOTHING, "nothing is known"),
        (401, {"error": {"message": "the key is wrong"}}, KEY_REFUSED, "it refuses the API key: give --api-key"),
        (502, ["?"], UNREACHABLE, "no squadron server"),
    ],
)
def test_command_says_why_it_cannot_tell(monkeypatch, capsys, status, body, code, said):
    answering(monkeypatch, status, body)
    assert show_why("127.0.0.1:8000", None, "x", as_json=False) == code
    assert said in capsys.readouterr().out


def test_command_says_that_nobody_answers(capsys):
    assert show_why("127.0.0.1:9", None, "x", as_json=False) == UNREACHABLE
    assert "give its --url" in capsys.readouterr().out


def test_record_is_dumped_and_old_dumps_go(tmp_path):
    flight = FlightRecorder(lambda: 10.0)
    flight.note("cmpl-1@1.0", Wait.BLOCKS, "9 for its tokens so far", 7.5)
    for i in range(MOST_DUMPS + 2):
        path = dump_flight(flight, tmp_path, "replica", "a rank died", clock=lambda i=i: 1000.0 + i)
        assert path is not None
        os.utime(path, (1000.0 + i, 1000.0 + i))
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == MOST_DUMPS
    body = json.loads(kept[-1].read_text())
    assert (body["replica"], body["reason"]) == ("replica", "a rank died")
    assert body["requests"] == {"cmpl-1@1.0": [[2.5, "blocks", "9 for its tokens so far"]]}


async def test_replica_that_dies_leaves_its_record(tmp_path, monkeypatch):
    ended, reasons = asyncio.Event(), []
    monkeypatch.setattr("cluster.replica.host._end_process", ended.set)
    config = ClusterConfig(model=str(demo_model_path()), max_model_len=256, num_kv_blocks=64)
    host = ReplicaHost("a", config, start_group(config), reasons.append, tmp_path)
    host.core.flight.note("cmpl-1@1.0", Wait.BLOCKS, "9 for its tokens so far")
    host.core.on_dead("rank 1 was killed")
    await asyncio.wait_for(ended.wait(), 10)
    await until(lambda: reasons == ["rank 1 was killed"])
    (path,) = tmp_path.iterdir()
    assert "rank 1 was killed" in path.read_text()
    assert "9 for its tokens so far" in path.read_text()
    await host.core.close()


def test_folder_that_cannot_be_written_is_told_in_the_log(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        assert dump_flight(FlightRecorder(lambda: 0.0), tmp_path / "none", "r", "x") is None
    assert "cannot be kept" in caplog.text


def test_log_folder_is_where_the_logger_writes(tmp_path):
    logger = logging.getLogger("tests.flight")
    assert log_folder("tests.flight") is None
    handler = logging.FileHandler(tmp_path / "serve.log")
    logger.addHandler(logging.handlers.MemoryHandler(10, target=handler))
    try:
        assert log_folder("tests.flight") == Path(tmp_path)
    finally:
        logger.handlers.clear()
        handler.close()
