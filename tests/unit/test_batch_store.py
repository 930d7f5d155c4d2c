"""What a server keeps of files and batches: whole or not at all, each tenant's own, changed by the rules alone."""

import os
import threading
import time
from contextlib import suppress
from itertools import pairwise

import fsspec
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from openai.types import Batch, FileObject

from cluster.batch.errors import FencedError
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
from cluster.batch.server.windows import GRACE, KEEP_SECONDS, Windows
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


def over(one):
    if one.status == "cancelling":
        return changes.cancelled(one, NOW, OUTCOME)
    return changes.failed(one, NOW, [LineError(code="x", message="y")])


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
    assert store.batches.read(batch.id) == batch


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


def test_a_wish_to_cancel_is_seen_at_once_and_by_its_runner(store, monkeypatch):
    batch = batch_of(store, keep(store))
    asked = store.cancel_batch(batch.id, "a")
    assert asked.status == "cancelling"
    assert abs(asked.cancelling_at - time.time()) < 5
    assert store.batches.follow(batch) == asked
    monkeypatch.setattr("cluster.batch.server.store.time.time", lambda: asked.cancelling_at + 60.0)
    assert store.cancel_batch(batch.id, "a") == asked, "asked again, it is the same wish"
    assert store.batches.page("a", Asked(5)).items == [asked]
    outcome = Outcome(RequestCounts(5, 2, 0), "file-x")
    done = store.batches.change(store.batches.follow(batch), lambda now: changes.ended(now, NOW, outcome))
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
        store.batches.change(before, lambda now: changes.cancelling(now, NOW))
    store.batches.note(changes.counted(before, COUNTS))  # of a runner that wakes up late
    assert store.batch(batch.id, "a") == batch == store.batches.page("a", Asked(5)).items[0]


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
            store.batches.write(over(one))
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
    later = time.monotonic() + STALE_MARK + 5
    monkeypatch.setattr("time.time", lambda: 2 * 1e9)
    assert list(store.batches.unended()) == batches[1:]
    assert new in root.names("open"), "what the time of day says of it is no reason"
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert list(store.batches.unended()) == batches[1:]
    assert new not in root.names("open")


# --- the time that a batch has


DAY = 24 * 3600


class Clocks:
    """Of one machine: its time of day, and the clocks of processes, which begin anew with each."""

    def __init__(self, store):
        self._store = store
        self.time_of_day = NOW + 100.0
        self.steady = 0.0

    def pass_by(self, seconds, jump=0.0):
        self.steady += seconds
        self.time_of_day += seconds + jump

    def runner(self):
        begun = self.steady
        windows = Windows(self._store.root, lambda: self.steady - begun, lambda: self.time_of_day)
        windows.look(self._store.batches.unended())
        return windows


def begun_at(store, created_at, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("cluster.batch.server.ids.time.time_ns", lambda: int(created_at * 10**9))
        return batch_of(store, keep(store))


@pytest.mark.parametrize("jump", [-2 * DAY, 2 * DAY])
def test_a_time_of_day_that_jumps_ends_no_batch_and_lets_none_live_longer(store, monkeypatch, jump):
    clocks = Clocks(store)
    old = begun_at(store, clocks.time_of_day, monkeypatch)
    windows = clocks.runner()
    clocks.pass_by(3600, jump)
    windows.look(store.batches.unended())
    new = begun_at(store, clocks.time_of_day, monkeypatch)  # by a router of that machine
    windows.look(store.batches.unended())
    for hours in range(1, 24):
        assert not windows.is_over(old) and not windows.is_over(new), hours
        windows.look(store.batches.unended())
        clocks.pass_by(3600)
    assert windows.is_over(old) and not windows.is_over(new)
    clocks.pass_by(3600)
    assert windows.is_over(new)


def test_the_time_between_two_runners_counts_but_for_an_hour(store, monkeypatch):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    clocks.runner()
    clocks.pass_by(10 * 3600)
    windows = clocks.runner()
    clocks.pass_by(13.9 * 3600)
    assert not windows.is_over(batch)
    clocks.pass_by(0.2 * 3600)
    assert windows.is_over(batch)
    assert clocks.runner().is_over(batch) is False, "who had it last may have seen a wrong time of day"
    late = Clocks(store)
    late.pass_by(5 * DAY)
    windows = late.runner()
    assert not windows.is_over(batch)
    late.pass_by(3601)
    assert windows.is_over(batch)


def test_runners_that_die_again_and_again_give_a_batch_no_time(store, monkeypatch):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    clocks.pass_by(2 * DAY)
    lives = 0
    while not (windows := clocks.runner()).is_over(batch):
        clocks.pass_by(KEEP_SECONDS + 1)
        windows.look(store.batches.unended())
        clocks.pass_by(DAY)
        lives += 1
    assert lives * KEEP_SECONDS == pytest.approx(GRACE, rel=0.1)


def test_what_was_used_is_told_by_the_time_of_day_where_it_is_damaged(store, monkeypatch, caplog):
    clocks = Clocks(store)
    batch = begun_at(store, clocks.time_of_day, monkeypatch)
    store.root.write("used.json", b"{")
    clocks.pass_by(22 * 3600)
    windows = clocks.runner()
    assert "used.json is damaged" in caplog.text
    clocks.pass_by(2 * 3600 + 1)
    assert windows.is_over(batch)


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


def test_a_batch_counts_only_while_it_runs():
    running = changes.begun(record(), NOW, 3)
    assert changes.counted(running, COUNTS).request_counts == COUNTS
    for status in ("validating", *ENDED):
        with pytest.raises(IllegalChangeError, match="no rows of it run"):
            changes.counted(record(status=status), COUNTS)


class Life(RuleBasedStateMachine):
    """One batch among runners that come and go, clients that cancel it, and processes that die between two writes.

    Each runner knows the batch as it last saw it, and changes it from there, however long ago that was.
    """

    def __init__(self):
        super().__init__()
        self.store = Store(open_root(f"memory://life-{BATCH_IDS.new('a')}"), 1)
        self.batch = batch_of(self.store, keep(self.store))
        self.known = {}
        self.seen = [self.batch]

    @rule(runner=st.sampled_from("ABC"))
    def takes_over(self, runner):
        now = self.store.batches.read(self.batch.id)
        if not now.ended:
            self.known[runner] = self.store.batches.change(now, lambda one: changes.taken(one, runner))

    @rule(runner=st.sampled_from("ABC"), way=st.sampled_from(["in_progress", "finalizing", "failed", "ended"]))
    def changes_what_it_knows(self, runner, way):
        if (record := self.known.get(runner)) is None:
            return
        try:
            to = (lambda one: changes.ended(one, NOW + 86_400, OUTCOME)) if way == "ended" else WAYS[way]
            self.known[runner] = self.store.batches.change(record, to)
            assert self.known[runner].runner == runner
        except FencedError:
            now = self.store.batches.read(self.batch.id)
            assert now.ended or now.runner != runner, "only who lost it is refused"
            del self.known[runner]
        except IllegalChangeError:
            return

    @rule(runner=st.sampled_from("ABC"))
    def tells_how_far_it_is(self, runner):
        if runner in self.known:
            self.store.batches.note(self.known[runner])  # that it lost the batch it may not know yet

    @rule(runner=st.sampled_from("ABC"))
    def looks(self, runner):
        if runner in self.known:
            with suppress(FencedError):
                self.known[runner] = self.store.batches.follow(self.known[runner])

    @rule()
    def is_cancelled(self):
        with suppress(ApiError):
            assert self.store.cancel_batch(self.batch.id, "a").status in ("cancelling", "cancelled")

    @rule()
    def is_cancelled_by_a_router_that_dies_at_once(self):
        now = self.store.batches.read(self.batch.id)
        if "cancelling" in AFTER[now.status]:
            after = msgspec.structs.replace(changes.cancelling(now, NOW), number=now.number + 1)
            path = f"batches/{now.id}/state-{after.number}.json"
            assert self.store.root.create(path, msgspec.json.encode(after))

    @invariant()
    def nothing_is_taken_back(self):
        found, before = self.store.batch(self.batch.id, "a"), self.seen[-1]
        assert found.number >= before.number
        if found.number == before.number:
            assert found.status == before.status
        reachable = {before.status}
        for _ in AFTER:
            reachable |= {one for status in reachable for one in AFTER[status]}
        assert found.status in reachable
        assert not before.ended or found == before
        self.seen.append(found)
        assert [one.id for one in self.store.batches.unended()] == ([] if found.ended else [found.id])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- the place


def test_of_many_that_create_a_file_one_does(tmp_path):
    root, told, gate = open_root(str(tmp_path)), [], threading.Barrier(8)

    def create(number):
        gate.wait()
        told.append((root.create("batches/x/state-1.json", b"%d" % number), number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for created, number in told if created]
    assert root.read("batches/x/state-1.json") == b"%d" % winner
    assert root.create("batches/x/state-1.json", b"%d" % winner), "asked again by who did, it is its own"
    assert not root.create("batches/x/state-1.json", b"other")


def test_a_store_that_does_not_say_what_came_of_it_is_asked_what_lies_there(tmp_path, monkeypatch):
    root = open_root(f"memory://unsure-{tmp_path.name}")
    pipe = root._files.pipe_file

    def lost_answer(path, data, **more):
        pipe(path, data, **more)
        raise TimeoutError("the answer was lost")

    def never_came(path, data, **more):
        raise TimeoutError("the line is cut")

    def knows_no_condition(path, data, **more):
        pipe(path, data)
        pipe(path, b"of another one, a moment later")

    for does, path, wanted in [(lost_answer, "a", True), (knows_no_condition, "b", False)]:
        monkeypatch.setattr(root._files, "pipe_file", does)
        assert root.create(path, b"mine") is wanted
    monkeypatch.setattr(root._files, "pipe_file", never_came)
    with pytest.raises(TimeoutError, match="the line is cut"):
        root.create("d", b"mine")


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
