"""What a server keeps of files and batches: whole or not at all, each tenant's own, changed by the rules alone."""

import os
import threading
import time
from itertools import pairwise

import fsspec
import msgspec
import pytest
from openai.types import Batch, FileObject

from cluster.batch.server import changes
from cluster.batch.server.batches import STALE as STALE_MARK
from cluster.batch.server.changes import AFTER, Outcome
from cluster.batch.server.errors import IllegalChangeError, StoreError
from cluster.batch.server.ids import BATCH_IDS, FILE_IDS
from cluster.batch.server.local_root import STALE, LocalRoot
from cluster.batch.server.objects import ENDED, BatchRecord, BatchUsage, LineError, RequestCounts
from cluster.batch.server.pages import Asked, page_of
from cluster.batch.server.root import open_root
from cluster.batch.server.store import NewBatch, Store
from cluster.errors import ApiError
from engine.errors import ConfigError

URL = "/v1/completions"
NOW = 1_700_000_000
COUNTS = RequestCounts(3, 2, 1)
OUTCOME = Outcome(COUNTS, "file-out", "file-err", BatchUsage(input_tokens=5, output_tokens=7))


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    if request.param == "directory":
        yield str(tmp_path / "kept")
        return
    url = f"memory://kept-{tmp_path.name}"
    yield url
    files, path = fsspec.url_to_fs(url)
    if files.exists(path):
        files.rm(path, recursive=True)


@pytest.fixture
def store(place):
    return Store(open_root(place), 1 << 20)


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


def refused(code, status):
    return pytest.raises(ApiError, check=lambda error: (error.code, error.status) == (code, status))


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
    assert store.files.page("a", Asked(10)).items == []


def test_a_draft_is_seen_by_nobody_and_a_discarded_one_leaves_nothing(tmp_path):
    store = Store(open_root(str(tmp_path)), 1)
    draft = store.files.draft()
    draft.write(b"half")
    assert store.files.page("a", Asked(10)).items == []
    draft.discard()
    draft.discard()
    kept = keep(store)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"content", "meta.json"}
    assert content_of(store, kept) == b"{}\n"


def test_drafts_of_killed_processes_are_removed_and_those_of_live_ones_are_not(tmp_path):
    root = LocalRoot(tmp_path)
    old, young = root.draft(), root.draft()
    paths = list((tmp_path / "drafts").iterdir())
    long_ago = time.time() - STALE - 10
    os.utime(old._path, (long_ago, long_ago))
    Store(root, 1).sweep()
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
    assert store.files.page("a", Asked(10)).items == []


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
    assert [one.id for one in store.files.page("a", Asked(10)).items] == [mine.id]
    assert store.batches.page("a", Asked(10)).items == []
    assert store.batches.page("b", Asked(10)).items == [batch]
    assert store.batches.cancel_asked_at(batch.id) is None


def test_a_tenant_whose_ids_look_alike_still_sees_nothing(store, monkeypatch):
    stored = keep(store, tenant="a")
    batch = batch_of(store, stored, "a")
    monkeypatch.setattr("cluster.batch.server.ids._tag", lambda _: stored.id[19:27])
    assert store.files.page("b", Asked(10)).items == []
    assert store.batches.page("b", Asked(10)).items == []
    assert store.files.get(stored.id, "b") is None
    assert store.batches.get(batch.id, "b") is None


@pytest.mark.parametrize("oldest_first", [False, True])
def test_pages_hold_everything_once_and_in_order(store, oldest_first):
    made = [keep(store).id for _ in range(7)]
    for number in range(7):
        keep(store, tenant=f"other-{number}")
    found, after = [], ""
    while True:
        page = store.files.page("a", Asked(3, after, oldest_first))
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

    page = page_of(ids, Asked(20, "09000"), read)
    assert (page.items[0], len(page.items), page.has_more) == ("08999", 20, True)
    assert len(seen) == 21
    assert page_of(ids, Asked(20, "00005"), read).has_more is False


# --- batches


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


def test_a_wish_to_cancel_is_seen_at_once_and_leaves_the_record_to_its_runner(store, monkeypatch):
    batch = batch_of(store, keep(store))
    asked = store.cancel_batch(batch.id, "a")
    assert asked.status == "cancelling"
    assert abs(asked.cancelling_at - time.time()) < 5
    assert store.batches.read(batch.id) == batch, "only the runner writes it"
    monkeypatch.setattr("cluster.batch.server.store.time.time", lambda: asked.cancelling_at + 60.0)
    assert store.cancel_batch(batch.id, "a") == asked, "asked again, it is the same wish"
    assert store.batches.page("a", Asked(5)).items == [asked]
    wish = store.batches.cancel_asked_at(batch.id)
    done = changes.cancelled(changes.cancelling(batch, wish), wish + 1, Outcome(RequestCounts(5, 2, 0), "file-x"))
    store.batches.write(done)
    assert store.batch(batch.id, "a") == done == store.cancel_batch(batch.id, "a")


def test_a_batch_that_ended_before_the_wish_was_found_has_ended(store):
    batch = batch_of(store, keep(store))
    store.cancel_batch(batch.id, "a")
    done = changes.completed(changes.finalizing(changes.begun(batch, NOW, 3), NOW, COUNTS), NOW, OUTCOME)
    store.batches.write(done)
    assert store.batch(batch.id, "a") == done
    with refused("batch_ended", 409):
        store.cancel_batch(batch.id, "a")


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
        store.batches.write(changes.failed(one, NOW, [LineError(code="x", message="y")]))
    store.delete_file(stored.id, "a")
    with refused("not_found", 404):
        batch_of(store, stored)


def test_a_batch_and_a_deletion_that_meet_never_both_win(tmp_path):
    store = Store(open_root(str(tmp_path)), 1)
    for _ in range(40):
        stored, ends = keep(store), {}
        gate = threading.Barrier(3)

        def attempt(name, call, gate=gate, ends=ends):
            gate.wait()
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
            store.batches.write(changes.failed(one, NOW, [LineError(code="x", message="y")]))
    assert store.files._root.names("deleting") == []


def test_a_mark_on_the_file_keeps_new_batches_away_and_leaves_none_behind(store):
    stored = keep(store)
    mark = store.files.mark_deleting(stored.id)
    with refused("file_in_use", 409):
        batch_of(store, stored)
    store.files.unmark(mark)
    batch = batch_of(store, stored)
    assert store.batches.page("a", Asked(5)).items == [batch]


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
    assert store.batches.page("a", Asked(5)).items == []
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
    store.batches.write(changes.failed(batches[0], NOW, [LineError(code="x", message="y")]))
    assert list(store.batches.unended()) == batches[1:]
    root = store.batches._root
    root.write(f"open/{batches[0].id}", b"")  # killed between the end and its mark
    new = BATCH_IDS.new("a")
    root.write(f"open/{new}", b"")  # a batch that is being made
    assert list(store.batches.unended()) == batches[1:]
    assert new in root.names("open")
    assert batches[0].id not in root.names("open")
    later = time.time() + STALE_MARK + 5
    monkeypatch.setattr("cluster.batch.server.batches.time.time", lambda: later)
    assert list(store.batches.unended()) == batches[1:]
    assert new not in root.names("open")


# --- changes of status


WAYS = {
    "in_progress": lambda one: changes.begun(one, NOW + 1, 3, "demo"),
    "finalizing": lambda one: changes.finalizing(one, NOW + 2, COUNTS),
    "completed": lambda one: changes.completed(one, NOW + 3, OUTCOME),
    "failed": lambda one: changes.failed(one, NOW + 4, [LineError(code="bad", message="it is", line=7)]),
    "cancelling": lambda one: changes.cancelling(one, NOW + 5),
    "cancelled": lambda one: changes.cancelled(one, NOW + 6, OUTCOME),
    "expired": lambda one: changes.expired(one, NOW + 86_400, OUTCOME),
}


@pytest.mark.parametrize("status", AFTER)
@pytest.mark.parametrize("wanted", WAYS)
def test_a_change_is_legal_or_raises(status, wanted):
    before = record(status=status)
    if wanted not in AFTER[status]:
        with pytest.raises(IllegalChangeError, match=f"is {status} and cannot become {wanted}"):
            WAYS[wanted](before)
        return
    after = WAYS[wanted](before)
    assert after.status == wanted
    assert getattr(after, f"{wanted}_at") >= NOW
    assert (after.id, after.created_at) == (before.id, before.created_at)
    assert msgspec.json.decode(msgspec.json.encode(after), type=BatchRecord) == after
    Batch.model_validate(after.shown(), strict=True)


def test_nothing_follows_an_end_and_all_else_comes_to_one():
    assert {status for status, after in AFTER.items() if not after} == ENDED
    assert set().union(*AFTER.values()) == set(WAYS)


def test_a_whole_life_has_all_its_times():
    one = record()
    for wanted in ("in_progress", "finalizing", "completed"):
        one = WAYS[wanted](one)
    times = [one.created_at, one.in_progress_at, one.finalizing_at, one.completed_at]
    assert all(early < late for early, late in pairwise(times))
    shown = Batch.model_validate(one.shown(), strict=True)
    assert (shown.output_file_id, shown.error_file_id, shown.model) == ("file-out", "file-err", "demo")
    assert (shown.usage.total_tokens, shown.request_counts.failed) == (12, 1)


def test_a_failed_batch_says_why():
    shown = Batch.model_validate(WAYS["failed"](record()).shown(), strict=True)
    assert [(one.code, one.line, one.message) for one in shown.errors.data] == [("bad", 7, "it is")]
    with pytest.raises(IllegalChangeError, match="without an error"):
        changes.failed(record(), NOW, [])


def test_a_batch_does_not_expire_before_its_time_and_counts_only_while_it_runs():
    with pytest.raises(IllegalChangeError, match="it has time until"):
        changes.expired(record(), NOW + 86_399, OUTCOME)
    running = changes.begun(record(), NOW, 3)
    assert changes.counted(running, COUNTS).request_counts == COUNTS
    for status in ("validating", *ENDED):
        with pytest.raises(IllegalChangeError, match="no rows of it run"):
            changes.counted(record(status=status), COUNTS)


# --- the place


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("kept/here", "must be an absolute path or a URL"),
        ("no-such://x", "cannot be opened"),
        ("{}", "cannot be used"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_by_the_name_of_the_setting(tmp_path, given, said):
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=said) as caught:
        open_root(given.format(taken))
    assert caught.value.flag == "batch_dir"


def test_a_file_in_place_is_never_half_of_one(tmp_path):
    root = open_root(str(tmp_path))
    texts = [bytes([number]) * 100_000 for number in range(8)]
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for text in texts:
                root.write("batches/x/batch.json", text)

    root.write("batches/x/batch.json", texts[0])
    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(root.read("batches/x/batch.json") in texts for _ in range(500))
    finally:
        stop.set()
        thread.join()
    assert list((tmp_path / "drafts").iterdir()) == []


def test_an_upload_to_a_url_that_breaks_leaves_no_file(monkeypatch, tmp_path):
    root = open_root(f"memory://broken-{tmp_path.name}")
    draft = root.draft()
    draft.write(b"x" * 3000)

    def broken(source, target, _):
        target.write(source.read(10))
        raise OSError("the line is cut")

    monkeypatch.setattr("cluster.batch.server.url_root.shutil.copyfileobj", broken)
    with pytest.raises(OSError, match="the line is cut"):
        draft.put("files/x/content")
    draft.discard()
    assert root.names("files/x") == []


def test_the_root_lies_where_it_was_told(tmp_path):
    store = Store(open_root(f"file://{tmp_path}/deep/er"), 1)
    stored = keep(store)
    assert (tmp_path / "deep" / "er" / "files" / stored.id / "content").read_bytes() == b"{}\n"
