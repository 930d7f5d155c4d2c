"""Batches on the server: run to one end each, whoever dies, is asked to stop, or runs out of time."""

import asyncio
import errno
import json
import os
import stat
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import msgspec
import pytest

from cluster.batch.bounds import whole_room
from cluster.batch.check import check_input
from cluster.batch.errors import BusyError, FencedError, InputError, LedgerError, UnreachableError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.ledger import Ledger, read_replicas
from cluster.batch.ledger.records import Job
from cluster.batch.output.write import write_output
from cluster.batch.prepare import Preparer
from cluster.batch.rows import Task
from cluster.batch.server import changes
from cluster.batch.server.ending import ROWS_PER_FLUSH, end_rest, line_errors
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.objects import LineError, RequestCounts
from cluster.batch.server.one_batch import BatchModel, OneBatch
from cluster.batch.server.pages import Asked
from cluster.batch.server.root import open_root
from cluster.batch.server.runner import Runner
from cluster.batch.server.store import NewBatch, Store
from cluster.batch.server.sweeper import Sweeper
from cluster.batch.server.worker import ledger_folder, tenants_of
from cluster.config import ClusterConfig
from cluster.dispatch_config import DispatcherConfig
from cluster.dispatcher import Dispatcher
from cluster.errors import ApiError
from cluster.metrics import ClusterFigures, Metrics
from cluster.openai.checking import MAX_PRIORITY, unknown_model
from cluster.openai.reasoning.parsers import REASONING_PARSERS
from cluster.tenants.tenant import OPEN, Tenant, tenant_salt
from engine.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import served_model
from tests.unit.batch_lab import cut_off
from tests.unit.cluster_lab import Lab, until
from tests.unit.engine_driver import VOCAB

PATIENT = DispatcherConfig(admission_wait=60.0, no_replica_timeout=60.0)
TENANT = "acme"
URL = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), "tiny", vocab_size=VOCAB, max_model_len=128)


@pytest.fixture
def store(tmp_path):
    return Store(open_root(str(tmp_path / "store")), 10**6)


def rows(count, **more):
    body = {"model": "tiny", "max_tokens": 20, "temperature": 1.0, "ignore_eos": True, **more}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": {**body, "prompt": [i % 50 + 3, 5]}}
        for i in range(count)
    ]


def created(store, requests, endpoint=URL):
    draft = store.files.draft()
    draft.write("".join(json.dumps(one) + "\n" for one in requests).encode())
    stored = store.keep_input(draft, TENANT, "rows.jsonl")
    return store.create_batch(NewBatch(stored.id, endpoint), TENANT).id


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def lines(store, file_id):
    with store.files.open(store.file(file_id, TENANT)) as file:
        return [json.loads(line) for line in file]


class Server:
    """What runs batches, on the replicas of a lab."""

    def __init__(self, lab, store, model, folder, **more):
        self._lab, self._model = lab, model
        self.turn = asyncio.Lock()
        self.fingerprint, self.name, self.decisive = "f", "tiny", {"prompts": "f"}
        self.one = OneBatch(store, folder, self.model_of, **more)

    def model_of(self, name):
        if name not in (None, self.name):
            raise unknown_model(name, [self.name])
        dispatcher = self._lab.dispatcher
        metrics = Metrics().of("tiny", ClusterFigures)
        room = whole_room(dispatcher, 16, 64)
        return BatchModel(
            self._model, dispatcher, room, metrics, self.turn, self.fingerprint, 0, decisive=self.decisive
        )


async def test_a_batch_is_run_to_its_output_and_its_errors(model, store, tmp_path):
    requests = rows(30)
    requests[3]["body"]["max_tokens"] = -1
    requests[4]["url"] = "/v1/chat/completions"
    batch_id = created(store, requests)
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "completed"
    assert batch.model == "tiny"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 28, 2)
    assert batch.usage.output_tokens == 28 * 20
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = lines(store, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(30) if i not in (3, 4)]
    assert output[0]["response"]["body"]["usage"]["completion_tokens"] == 20
    errors = lines(store, batch.error_file_id)
    assert [line["custom_id"] for line in errors] == ["r3", "r4"]
    assert [(line["response"]["status_code"], line["error"]) for line in errors] == [(400, None)] * 2
    assert "the endpoint of the batch" in errors[1]["response"]["body"]["error"]["message"]
    assert not list((tmp_path / "ledgers").iterdir())
    assert not list(store.batches.unended())


async def test_the_next_runner_goes_on_where_one_died(model, store, tmp_path):
    batch_id = created(store, rows(30, max_tokens=60))
    ledgers = tmp_path / "ledgers"
    drawn = 0
    for life in range(3):
        async with Lab(PATIENT) as lab:
            await lab.start(f"replica-{life}", pace=0.002)
            server = Server(lab, store, model, ledgers)
            work = asyncio.create_task(server.one.run(batch_id))
            await until(lambda lab=lab, work=work: lab.dispatcher.counters.tokens > 400 or work.done())
            with pytest.raises(BusyError):
                await Server(lab, store, model, ledgers).one.run(batch_id)
            if life < 2:
                await cut_off(work)
            await asyncio.gather(work, return_exceptions=True)
            drawn += lab.dispatcher.counters.tokens
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "completed"
    assert [line["custom_id"] for line in lines(store, batch.output_file_id)] == [f"r{i}" for i in range(30)]
    assert drawn == 30 * 60  # told to stop, a runner writes down what came


async def test_a_cancelled_batch_keeps_what_was_done(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id = created(store, rows(200, max_tokens=40))
    async with Lab() as lab:
        await lab.start("a", pace=0.002)
        work = asyncio.create_task(Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id))
        await until(lambda: store.batch(batch_id, TENANT).request_counts.completed > 5)
        store.cancel_batch(batch_id, TENANT)
        assert store.batch(batch_id, TENANT).status == "cancelling"
        await work
        assert lab.dispatcher.num_live == 0
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "cancelled"
    output, errors = lines(store, batch.output_file_id), lines(store, batch.error_file_id)
    assert len(output) == batch.request_counts.completed < 200
    assert len(errors) == batch.request_counts.failed == 200 - len(output)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["response"] for line in errors} == {None}


@pytest.mark.parametrize("otherwise", ["completed", "failed"])
async def test_who_was_told_cancelling_is_not_told_otherwise(model, store, tmp_path, monkeypatch, otherwise):
    """The wish comes while the files are written, or while an input is checked that cannot be used."""
    batch_id = created(store, rows(3) if otherwise == "completed" else [])
    place = "server.ending.write_output" if otherwise == "completed" else "server.one_batch.check_input"
    act = {"completed": write_output, "failed": check_input}[otherwise]
    seen = []

    def wanted_no_more(*given):
        if not seen:
            seen.append(store.cancel_batch(batch_id, TENANT).status)
        return act(*given)

    monkeypatch.setattr(f"cluster.batch.{place}", wanted_no_more)
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    assert seen == ["cancelling"]
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 3 if otherwise == "completed" else 0)
    assert batch.cancelling_at is not None
    if batch.output_file_id is not None:
        assert len(lines(store, batch.output_file_id)) == 3


async def test_a_batch_tells_what_was_thinking_and_what_was_in_a_cache(model, store, tmp_path):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path, "{{- messages[0]['content'] -}}")
    parser = REASONING_PARSERS.get("deepseek_r1")
    thinking = replace(model, tokenizer=Tokenizer(str(folder)), reasoning_parser=parser)
    requests = rows(20)
    for one in requests:
        one["url"] = "/v1/chat/completions"
        del one["body"]["prompt"]
        one["body"]["messages"] = [{"role": "user", "content": "()*+,-./" * 2}]
    batch_id = created(store, requests, "/v1/chat/completions")
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, thinking, tmp_path / "ledgers").one.run(batch_id)
        cached = lab.dispatcher.counters.cached_tokens
    batch = store.batch(batch_id, TENANT)
    told = [one["response"]["body"]["usage"] for one in lines(store, batch.output_file_id)]
    thought = sum(one["completion_tokens_details"]["reasoning_tokens"] for one in told)
    assert (batch.usage.reasoning_tokens, batch.usage.cached_tokens) == (thought, cached)
    assert thought > 0 and cached > 0
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in told)


async def test_an_output_is_not_deleted_before_its_batch_has_ended(model, store, tmp_path, monkeypatch):
    batch_id = created(store, [*rows(2), {**rows(3)[2], "url": "/v1/embeddings"}])
    completed, codes = changes.completed, []

    def client_tidies_up(*given):
        for one in store.files.page(TENANT, Asked(10), "batch_output").items:
            with pytest.raises(ApiError) as caught:
                store.delete_file(one.id, TENANT)
            codes.append(caught.value.code)
        return completed(*given)

    monkeypatch.setattr(changes, "completed", client_tidies_up)
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    assert codes == ["file_in_use"] * 2
    batch = store.batch(batch_id, TENANT)
    assert len(lines(store, batch.output_file_id)) == 2
    for file_id in (batch.output_file_id, batch.error_file_id):
        store.delete_file(file_id, TENANT)


async def test_a_batch_whose_time_is_over_has_expired(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id = created(store, rows(200, max_tokens=40))
    now = [store.batch(batch_id, TENANT).created_at]
    async with Lab() as lab:
        await lab.start("a", pace=0.02)
        server = Server(lab, store, model, tmp_path / "ledgers", clock=lambda: now[0])
        work = asyncio.create_task(server.one.run(batch_id))
        await until(lambda: store.batch(batch_id, TENANT).request_counts.completed > 5)
        now[0] += 24 * 3600
        await work
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "expired"
    assert {line["error"]["code"] for line in lines(store, batch.error_file_id)} == {"batch_expired"}
    assert len(lines(store, batch.output_file_id)) == batch.request_counts.completed


@pytest.mark.parametrize(
    ("requests", "code", "told"),
    [
        ([*rows(2), *rows(1)], "invalid_input", "custom_id 'r0'"),
        ([], "invalid_input", "no rows"),
        ([{**rows(1)[0], "body": {"model": "other"}}], "model_not_found", "other"),
    ],
)
async def test_an_input_that_cannot_be_run_fails_with_what_is_wrong(model, store, tmp_path, requests, code, told):
    batch_id = created(store, requests)
    async with Lab() as lab:
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "failed"
    assert batch.errors[0].code == code
    assert told in batch.errors[0].message


async def test_errors_of_an_input_are_an_entry_each_with_its_line(model, store, tmp_path):
    nameless = [{key: value for key, value in one.items() if key != "custom_id"} for one in rows(12)]
    twice = created(store, [*rows(2), *rows(2)])
    many = created(store, nameless)
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        await server.one.run(twice)
        await server.one.run(many)
    assert [(one.code, one.line) for one in store.batch(twice, TENANT).errors] == [
        ("invalid_input", 3),
        ("invalid_input", 4),
    ]
    *first, last = store.batch(many, TENANT).errors
    assert [one.line for one in first] == list(range(1, 11))
    assert (last.line, last.message) == (None, "2 more rows are at fault")


async def test_a_huge_id_makes_no_huge_record(model, store, tmp_path):
    batch_id = created(store, [{**one, "custom_id": "x" * 80_000} for one in rows(11)])
    async with Lab() as lab:
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    assert store.batch(batch_id, TENANT).errors[0].message.endswith("already")
    assert len(msgspec.json.encode(store.batch(batch_id, TENANT))) < 32_000
    (huge,) = line_errors(InputError("x" * 10**6))
    assert len(huge.message) < 2000


def told(store, batch_id, change):
    """Write a change of a batch, as its runner does."""
    store.batches.write(change(store.batches.read(batch_id)))


@asynccontextmanager
async def at_work(server, batch_id):
    work = asyncio.create_task(server.one.run(batch_id))
    try:
        yield work
    finally:
        await cut_off(work)


async def left_by_a_runner(model, store, ledgers, batch_id, rows_done=5):
    """A batch of which some rows are done, and whose runner was killed."""
    async with Lab(PATIENT) as lab:
        await lab.start("a", pace=0.002)
        async with at_work(Server(lab, store, model, ledgers), batch_id):
            await until(lambda: store.batch(batch_id, TENANT).request_counts.completed > rows_done)


async def test_a_batch_that_waits_for_its_turn_shows_signs_of_life(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.ledger.epoch.BEAT", 0.01)
    batch_id = created(store, rows(3))
    epoch = tmp_path / "ledgers" / batch_id / "epoch-00000001"
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with server.turn, at_work(server, batch_id):
            await until(lambda: store.batch(batch_id, TENANT).status == "in_progress")
            seen = epoch.stat().st_mtime_ns
            await until(lambda: epoch.stat().st_mtime_ns > seen)


async def test_a_batch_that_waits_writes_nothing_that_is_not_new(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.001)
    batch_id, write, written, looks = created(store, rows(3)), store.batches.write, [], []
    cancel_asked_at = store.batches.cancel_asked_at
    monkeypatch.setattr(store.batches, "write", lambda one: (written.append(one), write(one)))
    monkeypatch.setattr(
        store.batches, "cancel_asked_at", lambda batch_id: (looks.append(1), cancel_asked_at(batch_id))[1]
    )
    async with Lab() as lab:
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with server.turn, at_work(server, batch_id):
            await until(lambda: len(looks) > 20)
    assert [one.status for one in written] == ["in_progress"]


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
        async with server.turn, at_work(server, batch_id) as work:
            await until(lambda: store.batch(batch_id, TENANT).status == "in_progress")
            (tmp_path / "ledgers" / batch_id / "epoch-00000002").write_bytes(b"")
            await asyncio.wait([work])
            with pytest.raises(FencedError):
                work.result()


async def test_a_batch_that_was_about_to_end_and_lost_its_ledger_runs_again(model, store, tmp_path):
    batch_id = created(store, rows(5))
    told(store, batch_id, lambda one: changes.begun(one, one.created_at, 5, "tiny"))
    told(store, batch_id, lambda one: changes.finalizing(one, one.created_at, RequestCounts(5, 5, 0)))
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
    late = store.batch(batch_id, TENANT).expires_at
    async with Lab() as lab:
        server = Server(lab, store, model, ledgers, **({"clock": lambda: late} if wanted == "expired" else {}))
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
    told(store, batch_id, lambda one: changes.begun(one, one.created_at, 5, "tiny"))
    store.cancel_batch(batch_id, TENANT)
    store.files.remove(store.batch(batch_id, TENANT).input_file_id)
    async with Lab() as lab:
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.output_file_id, batch.request_counts.total) == ("cancelled", None, 5)


async def test_what_expired_is_not_completed_by_the_next_runner(model, store, tmp_path, monkeypatch):
    batch_id, ledgers = created(store, rows(20)), tmp_path / "ledgers"
    told(store, batch_id, lambda one: changes.begun(one, one.created_at, 20, "tiny"))
    late = store.batch(batch_id, TENANT).expires_at
    async with Lab() as lab:
        server = Server(lab, store, model, ledgers, clock=lambda: late)
        with monkeypatch.context() as broken:
            broken.setattr(store.files, "add", full)
            with pytest.raises(OSError, match="No space"):
                await server.one.run(batch_id)
        await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, len(lines(store, batch.error_file_id))) == ("expired", 20)


@pytest.mark.parametrize(
    "changed", [{"fingerprint": "g"}, {"decisive": {"prompts": "g"}}], ids=["weights", "template"]
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
        changes, "begun", lambda *given, real=changes.begun: (seen.append(mode(folder)), real(*given))[1]
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
        monkeypatch.setattr("cluster.batch.server.private_folder.os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(LedgerError, match="no folder of this user's"):
            await server.one.run(created(store, rows(3)))


def test_ledgers_lie_in_the_directory_or_behind_a_url_in_a_folder_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.worker.tempfile.gettempdir", lambda: str(tmp_path))
    assert ledger_folder(str(tmp_path / "kept")) == tmp_path / "kept" / "ledgers"
    folder = ledger_folder("s3://bucket/squadron")
    assert (folder.parent, mode(folder)) == (tmp_path, 0o700)
    folder.chmod(0o755)  # as it was made by an earlier version
    assert ledger_folder("s3://bucket/squadron") == folder
    assert mode(folder) == 0o700
    assert ledger_folder("s3://bucket/other") != folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


async def test_trouble_with_reading_fails_no_batch(model, store, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    batch_id = created(store, rows(3))
    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        for place in ("cluster.batch.sources.reading._opened", "cluster.batch.check.tempfile.TemporaryDirectory"):
            with monkeypatch.context() as trouble:
                trouble.setattr(place, broken if place.endswith("_opened") else full)
                with pytest.raises(UnreachableError):
                    await server.one.run(batch_id)
            assert store.batch(batch_id, TENANT).status == "validating"
        await server.one.run(batch_id)
    assert store.batch(batch_id, TENANT).status == "completed"


async def test_a_line_may_be_no_longer_than_a_request(model, store, tmp_path):
    requests = rows(1)
    requests[0]["body"]["user"] = "x" * 2000
    batch_id = created(store, requests)
    async with Lab() as lab:
        await Server(lab, store, model, tmp_path / "ledgers", max_line_bytes=1024).one.run(batch_id)
    assert "1024" in store.batch(batch_id, TENANT).errors[0].message


def test_rows_that_end_without_an_answer_are_written_in_parts(tmp_path):
    class Watched(Ledger):
        """Tells how many rows each write takes."""

        def flush(self):
            written.append(len(self._pending))
            super().flush()

    written = []
    rows = 3 * ROWS_PER_FLUSH
    job = Job(rows=rows, input_digest="d", model="m", fingerprint="f", settings="", created=1, version="1")
    with closing(Watched.open(tmp_path, job, resume=True)) as ledger:
        end_rest(ledger, "batch_expired")
        assert ledger.totals.errors == {"batch_expired": rows}
    assert (sum(written), max(written)) == (rows, ROWS_PER_FLUSH)


async def test_attempts_to_end_a_batch_leave_one_output(model, store, tmp_path, monkeypatch):
    requests = rows(5)
    requests[0]["body"]["max_tokens"] = -1
    batch_id = created(store, requests)
    add = store.files.add

    def no_room_for_errors(draft, tenant, name, *more):
        return full() if name.endswith("_error.jsonl") else add(draft, tenant, name, *more)

    def killed(_):
        raise OSError("killed")

    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        for owner, name, broken in [
            (store.files, "add", no_room_for_errors),
            (changes, "completed", lambda *_: full()),
            (Ledger, "remove", killed),
        ]:
            with monkeypatch.context() as trouble:
                trouble.setattr(owner, name, broken)
                with pytest.raises(OSError, match=r"No space|killed"):
                    await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "completed"
    assert len(lines(store, batch.output_file_id)) == 4
    kept = {one.id for one in store.files.page(TENANT, Asked(10)).items}
    assert kept == {batch.input_file_id, batch.output_file_id, batch.error_file_id}


async def test_a_batch_that_failed_in_the_end_leaves_no_output(model, store, tmp_path, monkeypatch):
    batch_id = created(store, rows(3))
    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        with monkeypatch.context() as trouble:
            trouble.setattr(changes, "completed", lambda *_: full())
            with pytest.raises(OSError, match="No space"):
                await server.one.run(batch_id)
        server.name = "another"
        await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "failed"
    assert [one.id for one in store.files.page(TENANT, Asked(10)).items] == [batch.input_file_id]


def test_ledgers_of_batches_that_have_ended_are_swept(store, tmp_path):
    ids = {name: created(store, rows(1)) for name in ("runs", "ended", "is ending")}
    ids["is gone"] = BATCH_IDS.new(TENANT)
    for name in ("ended", "is ending"):
        told(store, ids[name], lambda one: changes.failed(one, 1, [LineError(code="x", message="y")]))
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
        told(store, batch_id, lambda one: changes.failed(one, 1, [LineError(code="x", message="y")]))
    for damaged in (ids[0], ids[2]):
        store.batches._root.write(f"batches/{damaged}/batch.json", b"damaged")
    Sweeper(store, tmp_path / "ledgers").sweep()
    assert {one.name for one in (tmp_path / "ledgers").iterdir()} == {ids[0], ids[2]}


async def test_sweeping_goes_on_after_trouble(store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.sweeper.SWEEP_SECONDS", 0.001)
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
        runner = Runner(store, Server(lab, store, model, tmp_path / "ledgers").one.run)
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
    runner = Runner(store, run_one, clock=lambda: now[0])
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
    runner = Runner(store, run_one)
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
    runner = Runner(store, run_one)
    with monkeypatch.context() as trouble:
        trouble.setattr(store.batches._root, "names", broken)
        work = asyncio.create_task(runner.run())
        await until(lambda: tried == ["broken"])
    runner.wake()
    await until(lambda: tried == ["broken", batch_id])
    await cut_off(work)


async def test_batches_that_wait_for_one_model_keep_no_other_away(store, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.runner.MAX_AT_ONCE", 3)
    first = [created(store, rows(1)) for _ in range(5)]
    last = created(store, rows(1))

    async def run_one(batch_id):
        model = "other" if batch_id == last else "tiny"
        if store.batches.read(batch_id).status == "validating":
            told(store, batch_id, lambda one: changes.begun(one, one.created_at, 1, model))
        await asyncio.Event().wait()

    runner = Runner(store, run_one)

    def runs(*ids):
        runner.wake()
        return set(runner.running) == set(ids)

    async with looking(runner):
        await until(lambda: runs(*first[:3], last))
        assert [store.batches.read(one).status for one in first] == ["in_progress"] * 5
        for one in first[:2]:
            told(store, one, lambda one: changes.failed(one, one.created_at, [LineError(code="x", message="y")]))
            runner.running[one].cancel()
        await until(lambda: runs(*first[2:], last))


@pytest.mark.parametrize("due", ["cancelled", "over"])
async def test_batches_that_stand_behind_many_are_ended_all_the_same(store, monkeypatch, due):
    monkeypatch.setattr("cluster.batch.server.runner.MAX_AT_ONCE", 2)
    ids = [created(store, rows(1)) for _ in range(6)]
    now = [0.0]

    async def run_one(batch_id):
        if not store.batches.read(batch_id).ended:
            await asyncio.Event().wait()

    runner = Runner(store, run_one, time_of_day=lambda: now[0])

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
            now[0] = store.batch(ids[-1], TENANT).expires_at
        while left:
            await until(lambda: ending() <= left and len(ending()) == min(2, len(left)))
            one = ending().pop()
            told(store, one, lambda one: changes.failed(one, 1, [LineError(code="x", message="y")]))
            runner.running[one].cancel()
            left.discard(one)
        await until(lambda: not ending())
        assert set(runner.running) == set(ids[:2])
