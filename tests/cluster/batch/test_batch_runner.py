"""Batches on the server: run to one end each, whoever dies, is asked to stop, or runs out of time."""

import asyncio
import errno
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from cluster.batch.errors import BusyError, InputError, UnreachableError
from cluster.batch.io.check import check_input
from cluster.batch.io.output_files import write_output
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import Job
from cluster.batch.server.finalizer import ROWS_PER_FLUSH, end_rest, line_errors
from cluster.batch.server.ids import PageQuery
from cluster.batch.server.limits import CompletionWindows
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.config_values import REASONING_PARSERS
from cluster.errors import ApiError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.batch.batch_server_lab import (
    PATIENT,
    TENANT,
    Server,
    created,
    full,
    lines,
    rows,
)
from tests.cluster.cluster_lab import Lab, until


@pytest.fixture
def store(tmp_path):
    return Store(open_root(str(tmp_path / "store")), 10**6)


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
    place = "server.finalizer.write_output" if otherwise == "completed" else "server.one_batch.check_input"
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
    parser = REASONING_PARSERS.load("deepseek_r1")
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
    completed, codes = BatchRecord.completed, []

    def client_tidies_up(*given):
        for one in store.files.page(TENANT, PageQuery(10), "batch_output").items:
            with pytest.raises(ApiError) as caught:
                store.delete_file(one.id, TENANT)
            codes.append(caught.value.code)
        return completed(*given)

    monkeypatch.setattr(BatchRecord, "completed", client_tidies_up)
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
    now = [0.0]
    async with Lab() as lab:
        await lab.start("a", pace=0.02)
        server = Server(
            lab, store, model, tmp_path / "ledgers", windows=CompletionWindows(store.root, lambda: now[0])
        )
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


async def test_trouble_with_reading_fails_no_batch(model, store, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    batch_id = created(store, rows(3))
    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        for place in ("cluster.batch.io.reading._opened", "cluster.batch.io.check.tempfile.TemporaryDirectory"):
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
    add = store.files.add_unpublished

    def no_room_for_errors(draft, tenant, name, *more):
        return full() if name.endswith("_error.jsonl") else add(draft, tenant, name, *more)

    def killed(_):
        raise OSError("killed")

    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        for owner, name, broken in [
            (store.files, "add_unpublished", no_room_for_errors),
            (BatchRecord, "decided", lambda *_: full()),
            (store.files, "publish", lambda _: full()),
            (BatchRecord, "completed", lambda *_: full()),
            (Epoch, "remove_folder", killed),
        ]:
            with monkeypatch.context() as trouble:
                trouble.setattr(owner, name, broken)
                with pytest.raises(OSError, match=r"No space|killed"):
                    await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "completed"
    assert len(lines(store, batch.output_file_id)) == 4
    kept = {one.id for one in store.files.page(TENANT, PageQuery(10)).items}
    assert kept == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert len(store.root.names(f"files/{file_id}")) == 2, "one content, and what is told of it"


async def test_a_batch_that_failed_in_the_end_leaves_no_output(model, store, tmp_path, monkeypatch):
    batch_id = created(store, rows(3))
    async with Lab() as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        with monkeypatch.context() as trouble:
            trouble.setattr(BatchRecord, "decided", lambda *_: full())
            with pytest.raises(OSError, match="No space"):
                await server.one.run(batch_id)
        server.name = "another"
        await server.one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "failed"
    assert [one.id for one in store.files.page(TENANT, PageQuery(10)).items] == [batch.input_file_id]
