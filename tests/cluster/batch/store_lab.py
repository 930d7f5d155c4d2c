"""A store of files and batches: what tests keep in it, and the changes that a batch can see."""

from __future__ import annotations

import pytest

from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.objects import BatchRecord, BatchUsage, LineError, Outcome, RequestCounts
from cluster.batch.server.store import NewBatch
from cluster.errors import ApiError

URL = "/v1/completions"
NOW = 1_700_000_000
COUNTS = RequestCounts(3, 2, 1)
OUTCOME = Outcome(COUNTS, "file-out", "file-err", BatchUsage(input_tokens=5, output_tokens=7))
WAYS = {
    "in_progress": lambda one: one.begun(NOW + 1, 3, "demo"),
    "finalizing": lambda one: one.finalizing(NOW + 2, COUNTS),
    "completed": lambda one: one.completed(NOW + 3, OUTCOME),
    "failed": lambda one: one.failed(NOW + 4, [LineError(code="bad", message="it is", line=7)]),
    "cancelling": lambda one: one.cancelling(NOW + 5),
    "cancelled": lambda one: one.cancelled(NOW + 6, OUTCOME),
    "expired": lambda one: one.expired(NOW + 86_400, OUTCOME),
}


def keep(store, content=b"{}\n", tenant="a", filename="in.jsonl"):
    draft = store.files.draft()
    draft.write(content)
    return store.keep_input(draft, tenant, filename)


def batch_of(store, stored, tenant="a", **changes):
    return store.create_batch(NewBatch(stored.id, URL, **changes), tenant)


def content_of(store, stored, tenant="a"):
    _, file = store.open_file(stored.id, tenant)
    with file:
        return file.read()


def record(**changes):
    given = {"id": BATCH_IDS.new("a"), "tenant": "a", "endpoint": URL, "input_file_id": "file-1"}
    return BatchRecord(**given, created_at=NOW, expires_at=NOW + 86_400, **changes)


def over(one):
    if one.status == "cancelling":
        return one.cancelled(NOW, OUTCOME)
    return one.failed(NOW, [LineError(code="x", message="y")])


def refused(code, status):
    return pytest.raises(ApiError, check=lambda error: (error.code, error.status) == (code, status))
