"""The ledger of a batch: what was flushed is there after any death, nobody writes twice, nothing is believed half."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch.errors import BusyError, FencedError, LedgerError
from cluster.batch.ledger import ledger as ledger_module
from cluster.batch.ledger import row_files
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.ledger import Ledger, remove_left
from cluster.batch.ledger.records import Job, NewTokens, RowDone, difference
from cluster.batch.ledger.row_files import FrameWriter, framed, read_frames

JOB = Job(
    rows=10,
    input_digest="abc",
    model="demo",
    fingerprint="f",
    settings="{}",
    created=1_700_000_000,
    version="1",
)


def done(row, text=b"x", **more):
    return RowDone(row, 200, b'{"text":"%b %d"}' % (text, row), **more)


def rows_of(ledger):
    return [row for row in range(ledger.job.rows) if row in ledger.done]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out.jsonl.ledger"


def written(folder, *rows, **more):
    ledger = Ledger.open(folder, JOB, resume=True)
    for row in rows:
        ledger.note_done(done(row, **more))
    ledger.flush()
    return ledger


def test_results_come_back_in_the_order_of_the_input(folder):
    written(folder, 7, 2, 5).close()
    ledger = written(folder, *({*range(10)} - {7, 2, 5}))
    assert [one.row for one in ledger.results()] == list(range(10))
    assert ledger.totals.num_errors == 0
    ledger.remove()
    assert not folder.exists()


def test_what_was_not_flushed_is_not_done(folder):
    ledger = written(folder, 1)
    ledger.note_done(done(2))
    ledger.close()
    assert rows_of(written(folder)) == [1]


def test_a_row_is_noted_once(folder):
    ledger = written(folder, 1)
    with pytest.raises(LedgerError, match="row 1 is done twice"):
        ledger.note_done(done(1))


def test_a_missing_row_is_named(folder):
    ledger = written(folder, 0, 1, 2, 4)
    with pytest.raises(LedgerError, match="row 3 has no result"):
        list(ledger.results())


def test_a_file_torn_anywhere_loses_what_was_torn_alone(folder, tmp_path):
    written(folder, 0, 1, 2).close()
    whole = folder / "rows-00000001.log"
    frames = list(read_frames(whole))
    for cut in range(whole.stat().st_size):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(folder, copy)
        os.truncate(copy / whole.name, cut)
        ledger = Ledger.open(copy, JOB, resume=True)
        assert rows_of(ledger) == [row for row in range(3) if frames[row].end <= cut]
        for row in {*range(10)} - {*rows_of(ledger)}:
            ledger.note_done(done(row))
        assert [one.row for one in ledger.results()] == list(range(10))
        ledger.close()


def test_a_flipped_bit_is_seen(folder):
    written(folder, 0, 1, 2).close()
    path = folder / "rows-00000001.log"
    data = bytearray(path.read_bytes())
    data[list(read_frames(path))[1].start + 14] ^= 1
    path.write_bytes(data)
    assert rows_of(written(folder)) == [0]


def test_sums_are_those_of_all_drivers(folder):
    written(folder, 0, 1, prompt_tokens=3, output_tokens=4).close()
    ledger = written(folder, 2, prompt_tokens=3, output_tokens=4)
    ledger.note_done(RowDone(3, 400, b"{}", code="invalid_request"))
    ledger.flush()
    ledger.close()
    totals = written(folder).totals
    assert (totals.prompt_tokens, totals.output_tokens, totals.errors) == (9, 12, {"invalid_request": 1})


def test_two_drivers_in_one_process_or_two_never_write_at_once(folder):
    first = written(folder, 0)
    with pytest.raises(BusyError, match=f"process {os.getpid()} .* --resume"):
        Ledger.open(folder, JOB, resume=True)
    first.close()
    Ledger.open(folder, JOB, resume=True).close()


OTHER_DRIVER = """
import sys
from pathlib import Path
from tests.cluster.batch.test_batch_ledger import written
ledger = written(Path(sys.argv[1]), 1, 2)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_driver(folder):
    command = [sys.executable, "-c", OTHER_DRIVER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_driver_that_is_stopped_keeps_its_place_and_one_that_is_killed_loses_it(folder, other_driver):
    other_driver.send_signal(signal.SIGSTOP)
    with pytest.raises(BusyError, match=f"process {other_driver.pid} "):
        Ledger.open(folder, JOB, resume=True)
    other_driver.kill()
    other_driver.wait()
    assert rows_of(written(folder)) == [1, 2]


def on_another_host(folder):
    """The driver that holds the ledger looks like one of another machine, where no lock of ours is seen."""
    path = max(folder.glob("epoch-*"))
    holder = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(holder | {"host": "elsewhere"}))
    return path


def test_a_silent_driver_on_another_host_is_fenced_and_what_it_writes_later_does_not_count(folder, monkeypatch):
    monkeypatch.setattr("cluster.batch.ledger.epoch.BEAT", 60.0)
    old = written(folder, 0, 1)
    on_another_host(folder)
    new = Ledger.open(folder, JOB, resume=True, lease=0.3)
    with pytest.raises(FencedError, match="has taken over"):
        old.flush()
    with pytest.raises(FencedError):
        old.sync()
    old._rows.append(
        [msgspec.msgpack.encode(done(2, b"late"))]
    )  # as if it had looked a moment before the new one came
    for row in range(2, 10):
        new.note_done(done(row, b"new"))
    assert [one.body for one in new.results()][1:3] == [b'{"text":"x 1"}', b'{"text":"new 2"}']
    new.close()
    last = Ledger.open(folder, JOB, resume=True)
    assert [one.body for one in last.results()][2] == b'{"text":"new 2"}'


def test_a_driver_on_another_host_that_shows_life_is_left_alone(folder):
    old = written(folder, 0)
    path = on_another_host(folder)
    beats = subprocess.Popen(["sh", "-c", f"while sleep 0.05; do touch {path}; done"])
    try:
        with pytest.raises(BusyError, match="elsewhere"):
            Ledger.open(folder, JOB, resume=True, lease=5.0)
        old.flush()
    finally:
        beats.kill()
        beats.wait()


def test_an_epoch_that_died_while_it_began_is_passed_over(folder):
    written(folder, 0).close()
    (folder / "epoch-00000002").write_bytes(b"")
    ledger = written(folder, 1)
    assert rows_of(ledger) == [0, 1]
    ledger.close()
    assert rows_of(written(folder)) == [0, 1]


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ('{"seed":1,"columns":{"chat":true}}', '{"columns":{"chat":true},"seed":1}', "begun by Squadron 1, which"),
        ('{"columns":{}}', '{"columns":{"answers":[1]}}', "--answers was not set and is '[1]'"),
        ("of old", "{}", "--settings was 'of old' and is not set"),
    ],
)
def test_settings_of_other_versions_differ_in_words_too(was, now, told):
    first, job = (msgspec.structs.replace(JOB, settings=settings) for settings in (was, now))
    assert told in difference(first, job)
    assert difference(first, msgspec.structs.replace(first, created=5, version="9")) is None


def test_another_job_is_refused_by_what_differs(folder):
    written(folder).close()
    with pytest.raises(LedgerError, match="did not end; go on with --resume"):
        Ledger.open(folder, JOB, resume=False)
    with pytest.raises(LedgerError, match="model was 'demo' and is 'other'"):
        Ledger.open(folder, msgspec.structs.replace(JOB, model="other"), resume=True)
    with pytest.raises(LedgerError, match="the input was changed"):
        Ledger.open(folder, msgspec.structs.replace(JOB, input_digest="d"), resume=True)
    later = msgspec.structs.replace(JOB, created=2_000_000_000, version="2")
    assert Ledger.open(folder, later, resume=True).job.created == JOB.created


def test_a_full_disk_is_told_and_what_was_whole_before_is_kept(folder, monkeypatch):
    ledger = written(folder, 0)
    real = os.write

    def half(fd, data):
        if len(data) > 1:
            return real(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger.note_done(done(1))
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(LedgerError, match=r"No space left on device.*--resume"):
        ledger.flush()
    monkeypatch.setattr(os, "write", real)
    ledger.note_done(done(2))
    with pytest.raises(LedgerError, match="No space left"):
        ledger.flush()  # behind half a frame nothing would be found again
    ledger.close()
    assert rows_of(written(folder)) == [0]


def test_tokens_of_live_rows_are_found_by_the_next_driver(folder):
    ledger = written(folder)
    ledger.note_tokens(NewTokens(4, 0, 0, (1, 2)))
    ledger.note_tokens(NewTokens(4, 1, 0, (9,), "stop"))
    ledger.note_tokens(NewTokens(4, 0, 2, (3,)))
    ledger.note_tokens(NewTokens(5, 0, 0, (7,)))
    ledger.note_done(done(5))
    ledger.flush()
    ledger.close()
    for _ in range(2):  # handed on, though the second driver does nothing
        ledger = Ledger.open(folder, JOB, resume=True)
        assert {
            row: {n: (c.tokens, c.finish) for n, c in found.items()} for row, found in ledger.partial.items()
        } == {4: {0: ([1, 2, 3], None), 1: ([9], "stop")}}
        ledger.close()


def test_a_start_that_fails_on_a_full_disk_loses_no_tokens(folder, monkeypatch):
    ledger = written(folder, 1)
    ledger.note_tokens(NewTokens(4, 0, 0, (1, 2, 3)))
    ledger.flush()
    ledger.close()
    real = os.write
    for failing in range(3):
        left = [failing]

        def write(fd, data, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data)

        monkeypatch.setattr(os, "write", write)
        with suppress(LedgerError):
            Ledger.open(folder, JOB, resume=True).close()
        monkeypatch.setattr(os, "write", real)
    ledger = Ledger.open(folder, JOB, resume=True)
    assert ledger.partial[4][0].tokens == [1, 2, 3]
    assert rows_of(ledger) == [1]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="--ledger"):
        Ledger.open(tmp_path / "file" / "ledger", JOB, resume=True)


def test_a_row_that_begins_anew_has_no_old_tokens(folder):
    ledger = written(folder)
    ledger.note_tokens(NewTokens(4, 0, 0, (1, 2)))
    ledger.forget_tokens(4)
    ledger.note_tokens(NewTokens(4, 0, 0, (5,)))
    ledger.flush()
    ledger.close()
    assert Ledger.open(folder, JOB, resume=True).partial[4][0].tokens == [5]


def test_the_file_of_tokens_stays_small(folder, monkeypatch):
    monkeypatch.setattr(row_files, "COMPACT_FROM", 2000)
    ledger = Ledger.open(folder, msgspec.structs.replace(JOB, rows=1000), resume=True)
    ledger.note_tokens(NewTokens(999, 0, 0, (1, 2, 3)))
    sizes = []
    for row in range(900):
        ledger.note_tokens(NewTokens(row, 0, 0, tuple(range(50))))
        ledger.note_done(done(row))
        ledger.flush()
        sizes.append(sum(path.stat().st_size for path in folder.glob("tokens-*")))
    assert max(sizes) < 5000
    assert len(list(folder.glob("tokens-*"))) == 1
    ledger.close()
    job = msgspec.structs.replace(JOB, rows=1000)
    assert {row: found[0].tokens for row, found in Ledger.open(folder, job, resume=True).partial.items()} == {
        999: [1, 2, 3]
    }


def test_frames_of_any_payload_come_back(tmp_path):
    payloads = [b"", b"x" * 70_000, b"\0" * 12]
    writer = FrameWriter(tmp_path / "f")
    starts = writer.append(payloads)
    writer.sync()
    frames = list(read_frames(tmp_path / "f"))
    assert [frame.payload for frame in frames] == payloads
    assert [frame.start for frame in frames] == starts
    assert frames[-1].end == writer.size == sum(len(framed(one)) for one in payloads)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("done"), st.integers(0, 9)),
        st.tuples(st.just("tokens"), st.integers(0, 9)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("killed"), st.integers(0, 40)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_whatever_is_killed_each_row_is_there_once_and_tokens_never_go_wrong(tmp_path_factory, steps):
    """Against a model: `flushed` is what must be there; more may be, if the kill came later than a write."""
    folder = tmp_path_factory.mktemp("ledger") / "l"
    ledger = Ledger.open(folder, JOB, resume=True)
    noted: set[int] = set()
    flushed: set[int] = set()
    tokens: dict[int, int] = {}
    for kind, number in steps:
        if kind == "done" and number not in ledger.done:
            ledger.note_done(done(number))
            noted.add(number)
            tokens.pop(number, None)
        elif kind == "tokens" and number not in ledger.done:
            at = len(ledger.partial.get(number, {}).get(0, row_files.ChoiceTokens()).tokens)
            ledger.note_tokens(NewTokens(number, 0, at, (at, at + 1)))
        elif kind == "flush":
            ledger.flush()
            flushed |= noted
        elif kind == "killed":
            ledger.flush()
            before = set(rows_of(ledger))
            ledger.close()
            path = max(folder.glob("rows-*.log"))
            os.truncate(path, max(0, path.stat().st_size - number))
            ledger = Ledger.open(folder, JOB, resume=True)
            found = set(rows_of(ledger))
            assert found <= before
            assert number or found == before
            noted = flushed = found
        for found_tokens in ledger.partial.values():
            assert found_tokens[0].tokens == list(range(len(found_tokens[0].tokens)))
    for row in {*range(10)} - {*rows_of(ledger)}:
        ledger.note_done(done(row))
    assert [one.body for one in ledger.results()] == [done(row).body for row in range(10)]
    ledger.close()


@pytest.mark.parametrize("name", ["thesis.txt", "output.jsonl", "epoch-1", "ids-abcdefgh"])
def test_a_folder_that_holds_anything_else_is_no_ledger(folder, name):
    folder.mkdir()
    (folder / name).write_text("ten years of work")
    with pytest.raises(LedgerError, match=f"holds '{name}', which is of no ledger.*--ledger"):
        Ledger.open(folder, JOB, resume=True)
    assert os.listdir(folder) == [name]


def test_what_comes_into_the_folder_meanwhile_outlives_the_ledger(folder):
    ledger = written(folder, 0)
    (folder / "thesis.txt").write_text("ten years of work")
    ledger.remove()
    assert os.listdir(folder) == ["thesis.txt"]


@pytest.mark.parametrize("left", range(7))
def test_a_ledger_whose_removal_was_cut_off_counts_for_nothing(folder, monkeypatch, left):
    """Killed after each of its files in turn; then another batch of this output begins, or the same once more."""
    written(folder, 0).close()
    ledger = written(folder, 1)
    ledger.note_tokens(NewTokens(4, 0, 0, (1, 2)))
    ledger.agree_on("fingerprint")
    ledger.flush()
    count = len(os.listdir(folder))
    real, unlinked = type(folder).unlink, []

    def unlink(path, missing_ok=False):
        if len(unlinked) > left:
            raise KeyboardInterrupt
        unlinked.append(path)
        real(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(folder), "unlink", unlink)
        ledger.remove()
    assert len(os.listdir(folder)) == count - left - 1 > 0
    ledger.close()
    with closing(Ledger.open(folder, msgspec.structs.replace(JOB, input_digest="other"), resume=False)) as other:
        assert (other.done.count, other.partial, other.replicas) == (0, {}, None)
        for row in range(10):
            other.note_done(done(row, b"new"))
        assert [one.body for one in other.results()] == [done(row, b"new").body for row in range(10)]
        other.remove()
    assert not folder.exists()


def test_what_a_finished_batch_has_left_goes_and_what_another_has_stays(folder):
    remove_left(folder, JOB)
    written(folder, 0).close()
    with pytest.raises(LedgerError, match="of another job"):
        remove_left(folder, msgspec.structs.replace(JOB, input_digest="other"))
    with closing(written(folder, 1)), pytest.raises(BusyError):
        remove_left(folder, JOB)
    (folder / "job.json").unlink()
    remove_left(folder, JOB)
    assert not folder.exists()


def test_tries_that_fail_on_a_full_disk_leave_nothing_and_no_file_open(folder, monkeypatch):
    """A server tries every 10 s."""
    ledger = written(folder, 0)
    ledger.note_tokens(NewTokens(4, 0, 0, (1, 2, 3)))
    ledger.flush()
    ledger.close()
    real_write = os.write

    def full_for_frames(fd, data):
        if not bytes(data).startswith(b"{"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data)

    def full_for_parts(path, mode="r", *more, **named):
        if path.name.startswith("parts-") and mode == "wb":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(path, mode, *more, **named)

    files, descriptors = len(os.listdir(folder)), len(os.listdir("/proc/self/fd"))
    for where, name, failing in ((os, "write", full_for_frames), (ledger_module, "open", full_for_parts)):
        for _ in range(5):
            with monkeypatch.context() as patch, pytest.raises(LedgerError, match="No space left"):
                patch.setattr(where, name, failing, raising=False)
                Ledger.open(folder, JOB, resume=True)
        assert len(os.listdir(folder)) == files
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert written(folder).partial[4][0].tokens == [1, 2, 3]


def test_a_driver_that_looks_while_the_other_ends_is_told_so(folder, monkeypatch):
    """The holder, on another host, ends its batch while this one waits for a sign of life of it."""
    ledger = written(folder, 0)
    on_another_host(folder)
    monkeypatch.setattr("time.sleep", lambda _: folder.exists() and ledger.remove())
    with pytest.raises(BusyError, match=r"has just ended .* run this again"):
        Epoch(folder, lease=5.0)
    assert not folder.exists()


def test_two_hosts_of_one_name_do_not_take_over_from_each_other(folder, monkeypatch):
    """The other one's boot is not ours: whether it was this machine's last one, its signs of life tell."""
    ledger = written(folder, 0)
    path = folder / "epoch-00000001"
    beats = iter(range(10**6))
    monkeypatch.setattr("cluster.batch.ledger.epoch.boot_id", lambda: "of another machine")
    with monkeypatch.context() as alive:
        alive.setattr("time.sleep", lambda _: os.utime(path, (next(beats), 1)))
        alive.setattr("cluster.batch.ledger.epoch.BEAT", 60.0)
        with pytest.raises(BusyError):
            Epoch(folder, lease=5.0)
    ledger.flush()
    ledger.close()
    with closing(Epoch(folder, lease=0.1)), pytest.raises(FencedError):
        ledger.check()


def test_an_epoch_ends_those_before_it_and_leaves_none_of_their_files(folder):
    for number in range(1, 4):
        epoch = Epoch(folder) if folder.exists() else written(folder)
        assert [path.name for path in folder.glob("epoch-*")] == [f"epoch-{number:08}"]
        epoch.close()


@pytest.mark.parametrize(("where", "call"), [(os, "open"), (os, "link"), (Path, "iterdir")])
def test_a_folder_that_cannot_be_written_is_told_in_words(tmp_path, monkeypatch, where, call):
    def refused(path=None, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(LedgerError, match="cannot be written: Permission denied"):
        patch.setattr(where, call, refused)
        Epoch(tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sign_of_life_moves_the_file(folder):
    ledger = written(folder, 0)
    path = folder / "epoch-00000001"
    before = path.stat().st_mtime_ns
    time.sleep(0.02)
    ledger.sync()
    assert path.stat().st_mtime_ns > before


def test_a_driver_that_writes_nothing_for_long_shows_life_all_the_same(folder, monkeypatch):
    """Large weights load, an output of gigabytes is written: no other host may take it for dead meanwhile."""
    monkeypatch.setattr("cluster.batch.ledger.epoch.BEAT", 0.01)
    ledger = written(folder, 0)
    on_another_host(folder)
    with pytest.raises(BusyError, match="elsewhere"):
        Ledger.open(folder, JOB, resume=True, lease=5.0)
    ledger.close()


def test_a_driver_shows_life_while_it_reads_a_long_ledger(folder, monkeypatch):
    written(folder, 0).close()
    monkeypatch.setattr("cluster.batch.ledger.epoch.BEAT", 0.01)
    told = threading.Event()
    real_read, real_beat = ledger_module.read_done, Epoch.beat

    def beat(epoch):
        real_beat(epoch)
        told.set()

    def read(path, limit):
        assert told.wait(10.0)
        return real_read(path, limit)

    monkeypatch.setattr(Epoch, "beat", beat)
    monkeypatch.setattr(ledger_module, "read_done", read)
    written(folder).close()
    assert told.is_set()
