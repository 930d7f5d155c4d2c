"""What a server keeps of files: whole or not at all, each tenant's own, under ids of its own making."""

import os
import time

import fsspec
import pytest
from openai.types import FileObject

from cluster.batch.errors import StoreError
from cluster.batch.server.ids import BATCH_IDS, FILE_IDS, PageQuery, page_of
from cluster.batch.server.root import STALE, LocalRoot, open_root
from cluster.batch.server.store import NewBatch, Store
from tests.cluster.batch.store_lab import URL, batch_of, content_of, keep, refused

# --- ids


def test_ids_are_in_the_order_of_their_making_and_tell_when_that_was():
    before = int(time.time())
    ids = [FILE_IDS.new("a") for _ in range(50) if not time.sleep(0.00001)]
    assert ids == sorted(set(ids))
    assert all(before <= FILE_IDS.made_at(one) <= time.time() for one in ids)
    assert all(FILE_IDS.fits(one) and not BATCH_IDS.fits(one) for one in ids)


def test_what_comes_of_a_batch_has_the_same_id_each_time_and_is_its_tenants():
    one, other = BATCH_IDS.new("a"), BATCH_IDS.new("a")
    ids = [FILE_IDS.derived(batch, what) for batch in (one, other) for what in ("output", "error")]
    assert ids == [FILE_IDS.derived(batch, what) for batch in (one, other) for what in ("output", "error")]
    assert len(set(ids)) == 4
    assert all(FILE_IDS.may_be_of(file, "a") and not FILE_IDS.may_be_of(file, "b") for file in ids)
    assert FILE_IDS.made_at(ids[0]) == BATCH_IDS.made_at(one)


ZEROS = "0" * 32
NO_IDS = ["", "file-", "../etc/passwd", f"file-{ZEROS[1:]}", f"file-{ZEROS}0", "file-" + "G" * 32, "file-" + "A" * 32]
NO_IDS += [f"file-{ZEROS}\n", f"\nfile-{ZEROS}", f"file-/../{ZEROS[5:]}", f"FILE-{ZEROS}", "file-" + "٣" * 32]
NO_IDS += [f"file-{ZEROS[1:]}\0", f"batch_{ZEROS}"]


@pytest.mark.parametrize("wrong", NO_IDS)
def test_what_is_not_spelt_like_an_id_comes_near_no_path(store, wrong, monkeypatch):
    monkeypatch.setattr(type(store.files._root), "read", lambda *_: pytest.fail("a path was made of it"))
    assert not FILE_IDS.fits(wrong)
    for call in (store.file, store.open_file, store.delete_file):
        with refused("not_found", 404):
            call(wrong, "a")
    with refused("not_found", 404):
        store.create_batch(NewBatch(wrong, URL), "a")
    for call in (store.batch, store.cancel_batch):
        with refused("not_found", 404):
            call(wrong.replace("batch_", "file-"), "a")


# --- files


def test_a_file_comes_back_as_it_was_and_goes_when_it_is_deleted(store, place):
    stored = keep(store, b"x" * 300_000, filename="one.jsonl")
    assert (stored.size, stored.filename, stored.purpose) == (300_000, "one.jsonl", "batch")
    assert FileObject.model_validate(stored.shown(), strict=True).bytes == 300_000
    again = Store(open_root(place), 1)  # another process
    assert again.file(stored.id, "a") == stored
    assert content_of(again, stored) == b"x" * 300_000
    with fsspec.open(again.files.place(stored), "rb") as file:
        assert file.read() == b"x" * 300_000
    again.delete_file(stored.id, "a")
    for call in (store.file, store.open_file, store.delete_file):
        with refused("not_found", 404):
            call(stored.id, "a")
    assert store.files.page("a", PageQuery(10)).items == []


def test_a_draft_is_seen_by_nobody_and_a_discarded_one_leaves_nothing(tmp_path):
    store = Store(open_root(str(tmp_path)), 1)
    draft = store.files.draft()
    draft.write(b"half")
    assert store.files.page("a", PageQuery(10)).items == []
    draft.discard()
    draft.discard()
    kept = keep(store)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"content", "meta.json"}
    assert content_of(store, kept) == b"{}\n"


def test_drafts_of_killed_processes_are_removed_and_those_of_live_ones_are_not(tmp_path, monkeypatch):
    root = LocalRoot(tmp_path)
    old, young = root.draft(), root.draft()
    paths, now = list((tmp_path / "drafts").iterdir()), time.monotonic()
    store = Store(root, 1)
    os.utime(old._path, (1, 1))
    monkeypatch.setattr("time.time", lambda: 2 * 1e9)
    store.sweep()
    assert set(paths) == set((tmp_path / "drafts").iterdir()), "what the time of day says of them is no reason"
    monkeypatch.setattr("time.monotonic", lambda: now + STALE + 10)
    os.utime(young._path)
    store.sweep()
    assert set(paths) - set((tmp_path / "drafts").iterdir()) == {old._path}
    old.discard()
    young.discard()


def test_a_content_without_its_description_is_no_file(store, tmp_path):
    file_id = FILE_IDS.new("a")
    draft = store.files.draft()
    draft.write(b"{}")
    draft.put(f"files/{file_id}/content")
    with refused("not_found", 404):
        store.file(file_id, "a")
    assert store.files.page("a", PageQuery(10)).items == []


def test_a_file_that_cannot_be_described_takes_no_room(store, monkeypatch):
    def full(*_):
        raise OSError("no room")

    monkeypatch.setattr(store.files._root, "write", full)
    with pytest.raises(OSError, match="no room"):
        keep(store, b"x" * 1000)
    assert store.files._root.names("files") == []


def test_what_is_damaged_is_told_by_its_name(store):
    stored = keep(store)
    store.files._root.write(f"files/{stored.id}/meta.json", b"{}")
    with pytest.raises(StoreError, match=f"files/{stored.id}/meta.json is damaged"):
        store.file(stored.id, "a")


# --- tenants and lists


def test_what_is_anothers_is_not_there(store):
    mine, theirs = keep(store, tenant="a"), keep(store, tenant="b")
    batch = batch_of(store, theirs, "b")
    for call in (store.file, store.open_file, store.delete_file):
        with refused("not_found", 404):
            call(theirs.id, "a")
    for call in (store.batch, store.cancel_batch):
        with refused("not_found", 404):
            call(batch.id, "a")
    with refused("not_found", 404):
        store.create_batch(NewBatch(theirs.id, URL), "a")
    assert [one.id for one in store.files.page("a", PageQuery(10)).items] == [mine.id]
    assert store.batches.page("a", PageQuery(10)).items == []
    assert store.batches.page("b", PageQuery(10)).items == [batch]
    assert store.batches.read(batch.id) == batch


def test_a_tenant_whose_ids_look_alike_still_sees_nothing(store, monkeypatch):
    stored = keep(store, tenant="a")
    batch = batch_of(store, stored, "a")
    monkeypatch.setattr("cluster.batch.server.ids._tag", lambda _: stored.id[19:27])
    assert store.files.page("b", PageQuery(10)).items == []
    assert store.batches.page("b", PageQuery(10)).items == []
    assert store.files.get(stored.id, "b") is None
    assert store.batches.get(batch.id, "b") is None


@pytest.mark.parametrize("oldest_first", [False, True])
def test_pages_hold_everything_once_and_in_order(store, oldest_first):
    made = [keep(store).id for _ in range(7)]
    for number in range(7):
        keep(store, tenant=f"other-{number}")
    found, after = [], ""
    while True:
        page = store.files.page("a", PageQuery(3, after, oldest_first))
        found += [one.id for one in page.items]
        if not page.has_more:
            break
        after = found[-1]
        store.delete_file(after, "a")  # the next page needs no file to begin after
    assert found == (made if oldest_first else made[::-1])


def test_a_page_of_a_long_list_is_read_in_part():
    ids = [f"{number:05}" for number in range(10_000)]
    seen = []

    def read(some):
        seen.extend(some)
        return some

    page = page_of(ids, PageQuery(20, "09000"), read)
    assert (page.items[0], len(page.items), page.has_more) == ("08999", 20, True)
    assert len(seen) == 21
    assert page_of(ids, PageQuery(20, "00005"), read).has_more is False
