"""Batches on the server: run to one end each, whoever dies, is asked to stop, or runs out of time."""

import asyncio
import json

import pytest

from cluster.batch.bounds import whole_room
from cluster.batch.errors import BusyError
from cluster.batch.server.one_batch import BatchModel, OneBatch
from cluster.batch.server.root import open_root
from cluster.batch.server.runner import Runner
from cluster.batch.server.store import NewBatch, Store
from cluster.dispatch_config import DispatcherConfig
from cluster.metrics import ClusterFigures, Metrics
from cluster.openai.checking import unknown_model
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


def lines(store, file_id):
    with store.files.open(store.file(file_id, TENANT)) as file:
        return [json.loads(line) for line in file]


class Server:
    """What runs batches, on the replicas of a lab."""

    def __init__(self, lab, store, model, folder, clock=None):
        self._lab, self._model = lab, model
        self._turn = asyncio.Lock()
        times = {} if clock is None else {"clock": clock}
        self.one = OneBatch(store, folder, self.model_of, **times)

    def model_of(self, name):
        if name not in (None, "tiny"):
            raise unknown_model(name, ["tiny"])
        dispatcher = self._lab.dispatcher
        metrics = Metrics().of("tiny", ClusterFigures)
        return BatchModel(self._model, dispatcher, whole_room(dispatcher, 16, 64), metrics, self._turn, "f", 0)


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
    assert "the endpoint of the batch" in errors[1]["error"]["message"]
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


async def test_a_batch_whose_time_is_over_has_expired(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    batch_id = created(store, rows(200, max_tokens=40))
    now = [store.batch(batch_id, TENANT).created_at]
    async with Lab() as lab:
        await lab.start("a", pace=0.002)
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
