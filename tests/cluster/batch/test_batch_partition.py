"""Two runners of one batch that do not see each other: one of them ends it, and the other one changes nothing."""

import asyncio
import threading

import pytest

from cluster.batch.errors import BusyError, FencedError
from cluster.batch.server.batch_runner import Sweeper
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.batch.batch_server_lab import PATIENT, TENANT, Server, created, full, lines, rows
from tests.cluster.cluster_lab import Lab, until


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    return str(tmp_path / "store") if request.param == "directory" else f"memory://part-{tmp_path.name}"


@pytest.fixture
def store(place):
    return Store(open_root(place), 10**6)


@pytest.fixture
def short_times(monkeypatch):
    """Times of runners, about a tenth of what they are."""
    for name, seconds in {"BEAT": 0.1, "HOLD": 2.5, "LEASE": 3.0}.items():
        monkeypatch.setattr(f"cluster.batch.server.lease.{name}", seconds)
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)


class SlowRoot:
    """A root whose writes wait while it is held, as those of a machine whose network or processor stands still."""

    def __init__(self, root):
        self._root = root
        self.open = threading.Event()
        self.open.set()
        self.held = 0

    def __getattr__(self, name):
        found = getattr(self._root, name)
        if name not in ("write", "create", "remove"):
            return found

        def held(*given):
            if not self.open.is_set():
                self.held += 1
                assert self.open.wait(60)
            return found(*given)

        return held


def other_place(lab, store, model, folder):
    """A runner with ledgers that no other machine sees."""
    return Server(lab, store, model, folder, private=True)


async def test_a_batch_that_runs_on_one_machine_is_not_run_on_another(model, store, place, tmp_path, short_times):
    batch_id = created(store, rows(30, max_tokens=60))
    async with Lab(PATIENT) as here, Lab() as there:
        await here.start("a", pace=0.005)
        await there.start("b")
        work = asyncio.create_task(other_place(here, store, model, tmp_path / "here").one.run(batch_id))
        await until(lambda: here.dispatcher.counters.tokens > 50 or work.done())
        with pytest.raises(BusyError):
            await other_place(there, Store(open_root(place), 1), model, tmp_path / "there").one.run(batch_id)
        await work
        assert there.dispatcher.counters.tokens == 0
    assert store.batch(batch_id, TENANT).status == "completed"


async def test_a_runner_that_stood_still_stops_and_takes_nothing_back(model, store, place, tmp_path, short_times):
    batch_id, slow = created(store, rows(30, max_tokens=60)), SlowRoot(open_root(place))
    async with Lab(PATIENT) as here, Lab() as there:
        await here.start("a", steps=30)
        await there.start("b")
        late = Store(slow, 1)
        work = asyncio.create_task(other_place(here, late, model, tmp_path / "here").one.run(batch_id))
        await until(lambda: store.batch(batch_id, TENANT).request_counts.completed >= 0 and here.dispatcher.num_live)
        await until(lambda: store.batch(batch_id, TENANT).status == "in_progress")
        slow.open.clear()  # between what it saw and what it writes
        await other_place(there, store, model, tmp_path / "there").one.run(batch_id)
        ended = store.batch(batch_id, TENANT)
        answers = lines(store, ended.output_file_id)
        assert (ended.status, len(answers)) == ("completed", 30)
        assert here.dispatcher.num_live == 0, "its rows stopped when it could show no life any more"
        slow.open.set()
        with pytest.raises(FencedError):
            await work
    assert store.batch(batch_id, TENANT) == ended
    assert lines(store, ended.output_file_id) == answers


@pytest.mark.parametrize("moment", ["begun", "decided", "completed"])
async def test_whenever_a_runner_stands_still_the_other_ones_end_stays(
    model, store, place, tmp_path, short_times, monkeypatch, moment
):
    """It wakes after the batch was ended by another one, and goes on with the change that it was about to make."""
    batch_id, slow = created(store, rows(5)), SlowRoot(open_root(place))
    change = getattr(BatchRecord, moment)

    def stands_still(record, *given):
        if record.runner == first:
            slow.open.clear()
        return change(record, *given)

    async with Lab() as here, Lab() as there:
        await here.start("a")
        await there.start("b")
        first_server = other_place(here, Store(slow, 1), model, tmp_path / "here")
        first = ""
        with monkeypatch.context() as patched:
            taken = BatchRecord.taken

            def named(record, runner):
                nonlocal first
                first = first or runner
                return taken(record, runner)

            patched.setattr(BatchRecord, "taken", named)
            patched.setattr(BatchRecord, moment, stands_still)
            work = asyncio.create_task(first_server.one.run(batch_id))
            await until(lambda: slow.held or work.done())
            await other_place(there, store, model, tmp_path / "there").one.run(batch_id)
        ended = store.batch(batch_id, TENANT)
        slow.open.set()
        with pytest.raises(FencedError):
            await work
    assert ended.status == "completed"
    assert store.batch(batch_id, TENANT) == ended
    assert len(lines(store, ended.output_file_id)) == 5
    told = {one.id: len(store.root.names(f"files/{one.id}")) for one in ended.outcome.files}
    assert told == {ended.output_file_id: 2}, "what the other one made is gone, or was never there"


async def test_a_runner_that_was_killed_is_followed_on_another_machine(model, store, place, tmp_path, short_times):
    batch_id = created(store, rows(30, max_tokens=60))
    async with Lab(PATIENT) as here, Lab() as there:
        await here.start("a", steps=20)
        await there.start("b")
        work = asyncio.create_task(other_place(here, store, model, tmp_path / "here").one.run(batch_id))
        await until(lambda: store.batch(batch_id, TENANT).status == "in_progress" and here.dispatcher.num_live)
        await cut_off(work)
        await other_place(there, store, model, tmp_path / "there").one.run(batch_id)
        assert there.dispatcher.counters.tokens == 30 * 60
    assert store.batch(batch_id, TENANT).status == "completed"


async def test_a_batch_whose_end_was_decided_is_ended_so_on_a_machine_without_its_ledger(
    model, store, place, tmp_path, short_times
):
    batch_id = created(store, rows(5))
    async with Lab() as here, Lab() as there:
        await here.start("a")
        server = other_place(here, store, model, tmp_path / "here")
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(store.files, "publish", lambda _: full())
            with pytest.raises(OSError, match="No space"):
                await server.one.run(batch_id)
        assert store.batch(batch_id, TENANT).status == "finalizing"
        await other_place(there, store, model, tmp_path / "there").one.run(batch_id)
        assert there.dispatcher.counters.tokens == 0
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, len(lines(store, batch.output_file_id))) == ("completed", 5)


@pytest.mark.parametrize("moment", ["begun", "finalizing", "decided", "completed"])
async def test_who_is_told_cancelling_is_not_told_otherwise_whenever_that_is(
    model, store, place, tmp_path, monkeypatch, moment
):
    """The client cancels between what the runner saw last and what it writes."""
    batch_id, change, seen = created(store, rows(3)), getattr(BatchRecord, moment), []

    def wanted_no_more(*given):
        if not seen:
            seen.append(store.cancel_batch(batch_id, TENANT).status)
        return change(*given)

    monkeypatch.setattr(BatchRecord, moment, wanted_no_more)
    async with Lab() as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers").one.run(batch_id)
    assert seen == ["cancelling"]
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "cancelled"
    rows_told = len(lines(store, batch.output_file_id)) if batch.output_file_id else 0
    assert rows_told == batch.request_counts.completed == (0 if moment == "begun" else 3)


def test_signs_of_runners_that_are_gone_are_swept(store, tmp_path):
    store.root.write("runners/gone", b"1")
    store.root.write("runners/lives", b"1")
    sweeper = Sweeper(store, tmp_path)
    sweeper.sweep()
    store.root.write("runners/lives", b"2")
    sweeper.sweep()
    assert store.root.names("runners") == ["lives"]
