"""A batch on the server goes from runner to runner, and from one model to the next."""

import asyncio
import os

import pytest

from cluster.batch.errors import FencedError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.ledger import Ledger, read_replicas
from cluster.batch.server.limits import CompletionWindows
from cluster.batch.server.objects import RequestCounts
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.batch.batch_server_lab import (
    PATIENT,
    TENANT,
    Server,
    at_work,
    created,
    full,
    left_by_a_runner,
    lines,
    rows,
    told,
)
from tests.cluster.cluster_lab import Lab, until


@pytest.fixture
def store(tmp_path):
    return Store(open_root(str(tmp_path / "store")), 10**6)


def over(store):
    """The time of all batches that there are."""
    now = [0.0]
    windows = CompletionWindows(store.root, lambda: now[0])
    windows.observe(store.batches.unended())
    now[0] += 24 * 3600
    return windows


async def test_a_batch_that_waits_for_its_turn_shows_signs_of_life(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.ledger.epoch.BEAT", 0.01)
    batch_id = created(store, rows(3))
    epoch = tmp_path / "ledgers" / batch_id / "epoch-00000001"
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with server.others_turn(), at_work(server, batch_id):
            await until(lambda: store.batch(batch_id, TENANT).status == "in_progress")
            seen = epoch.stat().st_mtime_ns
            await until(lambda: epoch.stat().st_mtime_ns > seen)


async def test_a_batch_that_waits_writes_nothing_that_is_not_new(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.001)
    batch_id, written, looks = created(store, rows(3)), [], []
    note, follow = store.batches.note, store.batches.follow
    monkeypatch.setattr(store.batches, "note", lambda one: (written.append(one), note(one)))
    monkeypatch.setattr(store.batches, "follow", lambda one: (looks.append(1), follow(one))[1])
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with server.others_turn(), at_work(server, batch_id):
            await until(lambda: len(looks) > 20)
    assert [one.status for one in written] == ["validating", "in_progress", "in_progress"], "taken, begun, and waits"
    assert [one.waits_for for one in written[:2]] == [None, None]
    assert written[2].shown()["waits_for"] == f"batch batch_before of tenant {TENANT}, which runs first"


def test_who_let_go_of_an_epoch_touches_nothing_any_more(tmp_path):
    epoch = Epoch(tmp_path)
    epoch.close()
    other = tmp_path / "other"
    with other.open("w") as file:
        os.utime(other, (1, 1))
        epoch.beat()
        assert os.fstat(file.fileno()).st_mtime == 1


async def test_a_runner_that_another_one_follows_writes_no_record_any_more(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id = created(store, rows(3))
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with server.others_turn(), at_work(server, batch_id) as work:
            await until(lambda: store.batch(batch_id, TENANT).status == "in_progress")
            (tmp_path / "ledgers" / batch_id / "epoch-00000002").write_bytes(b"")
            await asyncio.wait([work])
            with pytest.raises(FencedError):
                work.result()


async def test_a_batch_that_was_about_to_end_and_lost_its_ledger_runs_again(model, store, tmp_path):
    batch_id = created(store, rows(5))
    told(store, batch_id, lambda one: one.begun(one.created_at, 5, "tiny"))
    told(store, batch_id, lambda one: one.finalizing(one.created_at, RequestCounts(5, 5, 0)))
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.request_counts) == ("completed", RequestCounts(5, 5, 0))
    assert len(lines(store, batch.output_file_id)) == 5


@pytest.mark.parametrize("wanted", ["cancelled", "expired", "failed"])
async def test_a_batch_ends_though_its_model_is_gone(model, store, tmp_path, monkeypatch, wanted):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id, ledgers = created(store, rows(200, max_tokens=40)), tmp_path / "ledgers"
    await left_by_a_runner(model, store, ledgers, batch_id)
    if wanted == "cancelled":
        store.cancel_batch(batch_id, TENANT)
    async with Lab() as lab:
        server = Server(lab, store, model, ledgers, **({"windows": over(store)} if wanted == "expired" else {}))
        server.name = "another"
        await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == wanted
    assert not list(ledgers.iterdir())
    if wanted == "failed":
        assert batch.errors[0].code == "model_not_found"
        return
    assert len(lines(store, batch.output_file_id)) == batch.request_counts.completed > 5
    assert {line["error"]["code"] for line in lines(store, batch.error_file_id)} == {f"batch_{wanted}"}


async def test_a_cancelled_batch_ends_though_its_input_is_gone(model, store, tmp_path):
    batch_id = created(store, rows(5))
    told(store, batch_id, lambda one: one.begun(one.created_at, 5, "tiny"))
    store.cancel_batch(batch_id, TENANT)
    store.files.remove(store.batch(batch_id, TENANT).input_file_id)
    async with Lab() as lab:
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.output_file_id, batch.request_counts.total) == ("cancelled", None, 5)


async def test_what_expired_is_not_completed_by_the_next_runner(model, store, tmp_path, monkeypatch):
    batch_id, ledgers = created(store, rows(20)), tmp_path / "ledgers"
    told(store, batch_id, lambda one: one.begun(one.created_at, 20, "tiny"))
    async with Lab() as lab:
        server = Server(lab, store, model, ledgers, windows=over(store))
        with monkeypatch.context() as broken:
            broken.setattr(store.files, "add_unpublished", full)
            with pytest.raises(OSError, match="No space"):
                await server.one.run(batch_id)
        await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, len(lines(store, batch.error_file_id))) == ("expired", 20)


@pytest.mark.parametrize(
    "changed", [{"fingerprint": "g"}, {"answer_settings": {"prompts": "g"}}], ids=["weights", "template"]
)
async def test_what_gives_other_answers_begins_a_batch_anew(model, store, tmp_path, monkeypatch, changed):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id, ledgers = created(store, rows(40)), tmp_path / "ledgers"
    await left_by_a_runner(model, store, ledgers, batch_id)
    async with Lab() as lab:
        await lab.start("b")
        server = Server(lab, store, model, ledgers)
        vars(server).update(changed)
        await server.one.run(batch_id)
        assert lab.dispatcher.counters.tokens == 40 * 20
    assert store.batch(batch_id, TENANT).status == "completed"


async def test_replicas_of_another_model_begin_a_batch_anew(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id, ledgers = created(store, rows(40)), tmp_path / "ledgers"
    async with Lab(PATIENT) as lab:
        await lab.start("a", pace=0.005, fingerprint="one")
        work = asyncio.create_task(Server(lab, store, model, ledgers).one.run(batch_id))
        await until(lambda: lab.dispatcher.counters.tokens > 200 or work.done())
        await cut_off(work)
    assert read_replicas(ledgers / batch_id) == "one"
    async with Lab(PATIENT) as lab:
        await lab.start("b", fingerprint="two")
        await Server(lab, store, model, ledgers).one.run(batch_id)
        assert lab.dispatcher.counters.tokens == 40 * 20
    assert store.batch(batch_id, TENANT).status == "completed"


async def test_a_batch_keeps_to_one_model_while_replicas_of_two_run(model, store, tmp_path, monkeypatch):
    """Its rows begin without a replica, and are handed to both before one of them draws the first token."""
    noted, note = set(), Ledger.note_tokens
    monkeypatch.setattr(Ledger, "note_tokens", lambda own, new: (noted.add(own.replicas), note(own, new)))
    batch_id = created(store, rows(40))
    async with Lab(PATIENT) as lab:
        async with at_work(Server(lab, store, model, tmp_path / "ledgers"), batch_id) as work:
            await until(lambda: lab.dispatcher.queue().requests > 0)  # which is what asks for a first replica
            old = await lab.start("old", steps=0, fingerprint="one")
            new = await lab.start("new", steps=0, fingerprint="two")
            await until(lambda: all(one.num_requests for one in lab.dispatcher.replicas()))
            new.executor.allow(3)
            await until(lambda: read_replicas(tmp_path / "ledgers" / batch_id) == "two")
            old.executor.allow(10**6)
            new.executor.allow(10**6)
            await work
        assert lab.dispatcher.counters.tokens > 40 * 20, "the other model drew some, which do not count"
    assert noted == {"two"}
    assert store.batch(batch_id, TENANT).request_counts == RequestCounts(40, 40, 0)
