"""A batch on the server: what it is made of, who runs it, and what it comes to."""

import asyncio
import errno
import json
from contextlib import asynccontextmanager

from cluster.batch.run.backlog import Backlog, full_bounds
from cluster.batch.server.batch_runner import TenantTurns
from cluster.batch.server.one_batch import BatchModel, OneBatch
from cluster.batch.server.store import NewBatch
from cluster.openai.validation import unknown_model
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.cluster_lab import Lab, until

PATIENT = DispatcherConfig(admission_wait=60.0, no_replica_timeout=60.0)
TENANT = "acme"
URL = "/v1/completions"


def rows(count, **more):
    body = {"model": "tiny", "max_tokens": 20, "temperature": 1.0, "ignore_eos": True, **more}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": {**body, "prompt": [i % 50 + 3, 5]}}
        for i in range(count)
    ]


def created(store, requests, endpoint=URL, tenant=TENANT):
    draft = store.files.draft()
    draft.write("".join(json.dumps(one) + "\n" for one in requests).encode())
    stored = store.keep_input(draft, tenant, "rows.jsonl")
    return store.create_batch(NewBatch(stored.id, endpoint), tenant).id


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def lines(store, file_id, tenant=TENANT):
    with store.files.open(store.file(file_id, tenant)) as file:
        return [json.loads(line) for line in file]


class Server:
    """What runs batches, on the replicas of a lab."""

    def __init__(self, lab, store, model, folder, **more):
        self._lab, self._model = lab, model
        self.turns = TenantTurns()
        self.backlog = Backlog(full_bounds(lab.dispatcher, 16, 64))
        self.fingerprint, self.name, self.answer_settings = "f", "tiny", {"prompts": "f"}
        self.one = OneBatch(store, folder, self.model_of, **more)

    def model_of(self, name):
        if name not in (None, self.name):
            raise unknown_model(name, [self.name])
        dispatcher = self._lab.dispatcher
        metrics = Metrics().of("tiny", ReplicaSetStats)
        return BatchModel(
            self._model,
            dispatcher,
            self.backlog,
            metrics,
            self.turns,
            self.fingerprint,
            0,
            answer_settings=self.answer_settings,
        )

    def others_turn(self):
        """Have another batch of the tenant run meanwhile."""
        return self.turns.turn(TENANT, "batch_before")


def told(store, batch_id, change):
    """Write a change of a batch, as its runner does."""
    store.batches.change(store.batches.read(batch_id), change)


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
