"""Many batches on the server: whose rows they are, in which order they run, and what is swept after them."""

import asyncio
import os
import stat
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest

from cluster.admission.keys import OPEN, Tenant
from cluster.admission.tenants import tenant_salt
from cluster.batch.errors import LedgerError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.row_requests import Preparer
from cluster.batch.rows import Task
from cluster.batch.server.batch_runner import Runner, Sweeper
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.limits import CompletionWindows
from cluster.batch.server.objects import BatchRecord, LineError, Outcome, RequestCounts
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.config import ClusterConfig
from cluster.deployments.batches import ledger_folder, tenants_of
from cluster.openai.validation import MAX_PRIORITY
from cluster.router.dispatcher import Dispatcher
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.batch.batch_server_lab import (
    TENANT,
    Server,
    created,
    full,
    rows,
    told,
)
from tests.cluster.cluster_lab import Lab, until


@pytest.fixture
def store(tmp_path):
    return Store(open_root(str(tmp_path / "store")), 10**6)


@pytest.mark.parametrize("by_priority", [True, False])
async def test_rows_use_their_tenants_cache_and_come_behind_clients(model, store, tmp_path, monkeypatch, by_priority):
    asked, charged = [], set()
    generate = Dispatcher.generate

    def seen(dispatcher, request, *more):
        asked.append((request.cache_salt, request.priority))
        charged.add(request.tenant)
        return generate(dispatcher, request, *more)

    monkeypatch.setattr(Dispatcher, "generate", seen)
    requests = rows(2, **({"priority": -5} if by_priority else {}))
    requests[1]["body"]["cache_salt"] = "own"
    async with Lab() as lab:
        await lab.start("a")
        own = replace(model, by_priority=by_priority)
        await Server(lab, store, own, tmp_path / "a").one.run(created(store, requests))
        await Server(lab, store, own, tmp_path / "b", tenant_of=lambda _: OPEN).one.run(created(store, requests))
    priority = MAX_PRIORITY if by_priority else 0
    salts = [tenant_salt(Tenant(TENANT), b""), tenant_salt(Tenant(TENANT), b"own")]
    assert sorted(asked[:2]) == sorted((salt, priority) for salt in salts)
    assert sorted(asked[2:]) == [(b"", priority), (b"own", priority)]
    assert charged == {TENANT}


def test_embeddings_use_their_tenants_cache_and_come_behind_clients(model):
    task = Task(0, "r0", "/v1/embeddings", {"model": "tiny", "input": [[3, 5], [4]]})
    call = Preparer(model, "job", 0, 1, lambda salt: salt + b"-own", 7).prepare(task).call
    assert [(one.cache_salt, one.priority) for one in call.requests] == [(b"-own", 7)] * 2


def test_keys_alone_make_tenants_apart():
    assert tenants_of(ClusterConfig("demo"))("default") is OPEN
    assert tenants_of(ClusterConfig("demo", api_key="k"))("default") == Tenant("default")
    assert tenants_of(ClusterConfig("demo", api_key_file="f"))("a") == Tenant("a")


async def test_ledgers_among_other_users_files_are_for_their_own_alone(model, store, tmp_path, monkeypatch):
    batch_id, folder = created(store, rows(3)), tmp_path / "shared" / "ledgers"
    folder.mkdir(parents=True, mode=0o755)
    seen = []
    monkeypatch.setattr(
        BatchRecord, "begun", lambda *given, real=BatchRecord.begun: (seen.append(mode(folder)), real(*given))[1]
    )
    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, folder, private=True)
        await server.one.run(batch_id)
        assert (seen, store.batch(batch_id, TENANT).status) == ([0o700], "completed")
        folder.rmdir()
        (tmp_path / "else").mkdir()
        folder.symlink_to(tmp_path / "else")
        with pytest.raises(LedgerError, match="TMPDIR"):
            await server.one.run(created(store, rows(3)))
        folder.unlink()
        monkeypatch.setattr("cluster.batch.ledger.epoch.os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(LedgerError, match="no folder of this user's"):
            await server.one.run(created(store, rows(3)))


def test_ledgers_lie_in_the_directory_or_behind_a_url_in_a_folder_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.deployments.batches.tempfile.gettempdir", lambda: str(tmp_path))
    assert ledger_folder(str(tmp_path / "kept")) == tmp_path / "kept" / "ledgers"
    folder = ledger_folder("s3://bucket/squadron")
    assert (folder.parent, mode(folder)) == (tmp_path, 0o700)
    folder.chmod(0o755)  # as it was made by an earlier version
    assert ledger_folder("s3://bucket/squadron") == folder
    assert mode(folder) == 0o700
    assert ledger_folder("s3://bucket/other") != folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_ledgers_of_batches_that_have_ended_are_swept(store, tmp_path):
    ids = {name: created(store, rows(1)) for name in ("runs", "ended", "is ending")}
    ids["is gone"] = BATCH_IDS.new(TENANT)
    for name in ("ended", "is ending"):
        told(store, ids[name], lambda one: one.failed(1, [LineError(code="x", message="y")]))
    for name in (*ids.values(), "else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_bytes(b"{}")
    with closing(Epoch(tmp_path / ids["is ending"])):
        Sweeper(store, tmp_path).sweep()
    assert {one.name for one in tmp_path.iterdir()} - {"store"} == {ids["runs"], ids["is ending"], "else"}
    Sweeper(store, tmp_path / "none").sweep()


def test_a_damaged_record_keeps_its_own_ledger_alone(store, tmp_path):
    ids = [created(store, rows(1)) for _ in range(4)]
    for batch_id in ids:
        (tmp_path / "ledgers" / batch_id).mkdir(parents=True)
        told(store, batch_id, lambda one: one.failed(1, [LineError(code="x", message="y")]))
    for damaged in (ids[0], ids[2]):
        store.batches._root.write(f"batches/{damaged}/batch.json", b"damaged")
    Sweeper(store, tmp_path / "ledgers").sweep()
    assert {one.name for one in (tmp_path / "ledgers").iterdir()} == {ids[0], ids[2]}


async def test_sweeping_goes_on_after_trouble(store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.batch_runner.SWEEP_SECONDS", 0.001)
    swept = []

    def sweep():
        swept.append(1)
        full()

    monkeypatch.setattr(store, "sweep", sweep)
    work = asyncio.create_task(Sweeper(store, tmp_path).run())
    await until(lambda: len(swept) > 2)
    await cut_off(work)


async def test_a_runner_takes_up_all_batches_and_new_ones(model, store, tmp_path):
    first = [created(store, rows(5)) for _ in range(3)]
    async with Lab() as lab:
        await lab.start("a")
        runner = Runner(store, Server(lab, store, model, tmp_path / "ledgers").one.run, CompletionWindows(store.root))
        work = asyncio.create_task(runner.run())
        await until(lambda: all(store.batch(one, TENANT).status == "completed" for one in first))
        later = created(store, rows(5))
        runner.wake()
        await until(lambda: store.batch(later, TENANT).status == "completed")
        await until(lambda: not runner.running)
        await cut_off(work)


async def test_a_batch_that_cannot_go_on_harms_no_other(store):
    tried = []

    async def run_one(batch_id):
        tried.append(batch_id)
        raise OSError(28, "No space left on device")

    batch_id = created(store, rows(1))
    now = [0.0]
    runner = Runner(store, run_one, CompletionWindows(store.root), clock=lambda: now[0])
    work = asyncio.create_task(runner.run())
    await until(lambda: tried == [batch_id] and not runner.running)
    runner.wake()
    await asyncio.sleep(0.05)
    assert tried == [batch_id]
    now[0] += 11
    runner.wake()
    await until(lambda: len(tried) == 2)
    assert not work.done()
    await cut_off(work)


@asynccontextmanager
async def looking(runner):
    work = asyncio.create_task(runner.run())
    try:
        yield work
    finally:
        await cut_off(work)


async def test_a_damaged_record_stops_no_other_batch(store, caplog):
    tried = []

    async def run_one(batch_id):
        tried.append(batch_id)

    damaged, whole = created(store, rows(1)), created(store, rows(1))
    store.batches._root.write(f"batches/{damaged}/batch.json", b"{")
    runner = Runner(store, run_one, CompletionWindows(store.root))
    async with looking(runner):
        await until(lambda: tried.count(whole) >= 1)
        runner.wake()
        await until(lambda: tried.count(whole) >= 2)
    assert damaged not in tried
    assert [damaged in one for one in caplog.messages].count(True) == 1


async def test_a_place_that_raises_anything_is_looked_at_again(store, monkeypatch):
    tried = []

    async def run_one(batch_id):
        tried.append(batch_id)

    def broken(_):
        tried.append("broken")
        raise ValueError("what a library raises")

    batch_id = created(store, rows(1))
    runner = Runner(store, run_one, CompletionWindows(store.root))
    with monkeypatch.context() as trouble:
        trouble.setattr(store.batches._root, "names", broken)
        work = asyncio.create_task(runner.run())
        await until(lambda: tried == ["broken"])
    runner.wake()
    await until(lambda: tried == ["broken", batch_id])
    await cut_off(work)


async def test_batches_that_wait_for_one_model_keep_no_other_away(store, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.batch_runner.MAX_AT_ONCE", 3)
    first = [created(store, rows(1)) for _ in range(5)]
    last = created(store, rows(1))

    async def run_one(batch_id):
        model = "other" if batch_id == last else "tiny"
        if store.batches.read(batch_id).status == "validating":
            told(store, batch_id, lambda one: one.begun(one.created_at, 1, model))
        await asyncio.Event().wait()

    runner = Runner(store, run_one, CompletionWindows(store.root))

    def runs(*ids):
        runner.wake()
        return set(runner.running) == set(ids)

    async with looking(runner):
        await until(lambda: runs(*first[:3], last))
        assert [store.batches.read(one).status for one in first] == ["in_progress"] * 5
        for one in first[:2]:
            told(store, one, lambda one: one.failed(one.created_at, [LineError(code="x", message="y")]))
            runner.running[one].cancel()
        await until(lambda: runs(*first[2:], last))


@pytest.mark.parametrize("due", ["cancelled", "over"])
async def test_batches_that_stand_behind_many_are_ended_all_the_same(store, monkeypatch, due):
    monkeypatch.setattr("cluster.batch.server.batch_runner.MAX_AT_ONCE", 2)
    ids = [created(store, rows(1)) for _ in range(6)]
    now = [0.0]

    async def run_one(batch_id):
        if not store.batches.read(batch_id).ended:
            await asyncio.Event().wait()

    runner = Runner(store, run_one, CompletionWindows(store.root, lambda: now[0]))

    def ending():
        runner.wake()
        return set(runner.running) - set(ids[:2])

    async with looking(runner):
        await until(lambda: set(runner.running) == set(ids[:2]))
        left = set(ids[3:] if due == "cancelled" else ids[2:])
        if due == "cancelled":
            for one in left:
                store.cancel_batch(one, TENANT)
        else:
            now[0] += 24 * 3600 + 1
        while left:
            await until(lambda: ending() <= left and len(ending()) == min(2, len(left)))
            one = ending().pop()
            told(store, one, lambda one: one.finished(2 * one.expires_at, Outcome(RequestCounts(), expired=True)))
            runner.running[one].cancel()
            left.discard(one)
        await until(lambda: not ending())
        assert set(runner.running) == set(ids[:2])
