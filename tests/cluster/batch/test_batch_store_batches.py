"""What a server keeps of batches: changed by the rules alone, each with its input, found until it has ended."""

import threading
import time

import pytest
from openai.types import Batch

from cluster.batch.errors import FencedError
from cluster.batch.server.batch_store import STALE as STALE_MARK
from cluster.batch.server.ids import BATCH_IDS, PageQuery
from cluster.batch.server.objects import LineError, Outcome, RequestCounts
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.errors import ApiError
from tests.cluster.batch.store_lab import COUNTS, NOW, URL, WAYS, batch_of, keep, over, refused


def test_a_batch_is_kept_with_all_that_its_client_said(store, place):
    stored = keep(store)
    batch = batch_of(store, stored, metadata={"night": "1"})
    found = Store(open_root(place), 1).batch(batch.id, "a")
    assert found == batch
    shown = Batch.model_validate(found.shown(), strict=True)
    assert (shown.status, shown.endpoint, shown.input_file_id) == ("validating", URL, stored.id)
    assert (shown.expires_at - shown.created_at, shown.completion_window) == (86_400, "24h")
    assert shown.metadata == {"night": "1"}
    assert (shown.request_counts.total, shown.errors, shown.usage) == (0, None, None)
    assert "tenant" not in found.shown()


def test_the_output_of_a_batch_is_no_input(store):
    draft = store.files.draft()
    draft.write(b"{}")
    output = store.files.add(draft, "a", "out.jsonl", "batch_output")
    with refused("invalid_value", 400):
        batch_of(store, output)
    assert list(store.batches.unended()) == []


def test_a_wish_to_cancel_is_seen_at_once_and_by_its_runner(store, monkeypatch):
    batch = batch_of(store, keep(store))
    asked = store.cancel_batch(batch.id, "a")
    assert asked.status == "cancelling"
    assert abs(asked.cancelling_at - time.time()) < 5
    assert store.batches.follow(batch) == asked
    monkeypatch.setattr("cluster.batch.server.store.time.time", lambda: asked.cancelling_at + 60.0)
    assert store.cancel_batch(batch.id, "a") == asked, "asked again, it is the same wish"
    assert store.batches.page("a", PageQuery(5)).items == [asked]
    outcome = Outcome(RequestCounts(5, 2, 0), "file-x")
    done = store.batches.change(store.batches.follow(batch), lambda now: now.finished(NOW, outcome))
    assert done.status == "cancelled"
    assert store.batch(batch.id, "a") == done == store.cancel_batch(batch.id, "a")


def test_a_batch_that_ended_cannot_be_cancelled_or_changed(store):
    batch = batch_of(store, keep(store))
    for way in ("in_progress", "finalizing", "completed"):
        before, batch = batch, store.batches.write(WAYS[way](batch))
    assert store.batch(batch.id, "a") == batch
    with refused("batch_ended", 409):
        store.cancel_batch(batch.id, "a")
    with pytest.raises(FencedError):
        store.batches.change(before, lambda now: now.cancelling(NOW))
    store.batches.note(before.counted(COUNTS))  # of a runner that wakes up late
    assert store.batch(batch.id, "a") == batch == store.batches.page("a", PageQuery(5)).items[0]


def test_a_file_is_not_deleted_while_a_batch_needs_it(store):
    stored = keep(store)
    batch = batch_of(store, stored)
    with refused("file_in_use", 409):
        store.delete_file(stored.id, "a")
    store.cancel_batch(batch.id, "a")
    with refused("file_in_use", 409):
        store.delete_file(stored.id, "a")
    batch_of(store, stored)  # the refusal left no trace
    for one in list(store.batches.unended()):
        store.batches.write(over(one))
    store.delete_file(stored.id, "a")
    with refused("not_found", 404):
        batch_of(store, stored)


def test_a_batch_and_a_deletion_that_meet_never_both_win(tmp_path):
    store = Store(open_root(str(tmp_path)), 1)
    for _ in range(40):
        stored, ends = keep(store), {}
        admission = threading.Barrier(3)

        def attempt(name, call, admission=admission, ends=ends):
            admission.wait()
            try:
                call()
                ends[name] = True
            except ApiError:
                ends[name] = False

        calls = [
            ("batch", lambda stored=stored: batch_of(store, stored)),
            ("delete", lambda stored=stored: store.delete_file(stored.id, "a")),
            ("again", lambda stored=stored: store.delete_file(stored.id, "a")),
        ]
        threads = [threading.Thread(target=attempt, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not (ends["batch"] and (ends["delete"] or ends["again"]))
        there = store.files.get(stored.id, "a") is not None
        assert there or not ends["batch"]
        for one in list(store.batches.unended()):
            store.batches.write(over(one))
    assert store.files._root.names("deleting") == []


def test_a_mark_on_the_file_keeps_new_batches_away_and_leaves_none_behind(store):
    stored = keep(store)
    mark = store.files.mark_deleting(stored.id)
    with refused("file_in_use", 409):
        batch_of(store, stored)
    store.files.unmark(mark)
    batch = batch_of(store, stored)
    assert store.batches.page("a", PageQuery(5)).items == [batch]


def test_a_batch_whose_input_goes_while_it_is_made_is_taken_back(store, monkeypatch):
    stored = keep(store)
    announce, found = store.batches.announce, []

    def announce_late(batch_id, input_file_id):
        announce(batch_id, input_file_id)
        store.files.mark_deleting(stored.id)
        found.append((list(store.batches.unended()), store.batches.read(batch_id)))

    monkeypatch.setattr(store.batches, "announce", announce_late)
    with refused("file_in_use", 409):
        batch_of(store, stored)
    assert found == [([], None)], "no runner has it, which would write it again"
    assert list(store.batches.unended()) == []
    assert store.batches.page("a", PageQuery(5)).items == []
    assert store.batches._root.names("open") == []


def test_a_batch_that_is_being_made_keeps_its_input(store):
    stored, batch_id = keep(store), BATCH_IDS.new("a")
    store.batches.announce(batch_id, stored.id)
    with refused("file_in_use", 409):
        store.delete_file(stored.id, "a")
    store.batches.drop(batch_id)
    store.delete_file(stored.id, "a")


def test_a_runner_finds_what_has_not_ended_of_everybody_and_nothing_else(store, monkeypatch):
    batches = [batch_of(store, keep(store, tenant=tenant), tenant) for tenant in ("a", "b", "a")]
    assert list(store.batches.unended()) == batches
    store.batches.write(batches[0].failed(NOW, [LineError(code="x", message="y")]))
    assert list(store.batches.unended()) == batches[1:]
    root = store.batches._root
    root.write(f"open/{batches[0].id}", b"")  # killed between the end and its mark
    new = BATCH_IDS.new("a")
    root.write(f"open/{new}", b"")  # a batch that is being made
    assert list(store.batches.unended()) == batches[1:]
    assert new in root.names("open")
    assert batches[0].id not in root.names("open")
    later = time.monotonic() + STALE_MARK + 5
    monkeypatch.setattr("time.time", lambda: 2 * 1e9)
    assert list(store.batches.unended()) == batches[1:]
    assert new in root.names("open"), "what the time of day says of it is no reason"
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert list(store.batches.unended()) == batches[1:]
    assert new not in root.names("open")
