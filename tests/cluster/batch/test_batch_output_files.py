"""The files of an output: whole or not there, the same bytes however often and whenever it is killed."""

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from cluster.batch.errors import BatchError, FencedError, InputError
from cluster.batch.io import places
from cluster.batch.io.manifest import OutputSpec, Style, is_finished, read_manifest, refuse_replacing
from cluster.batch.io.output_files import try_output
from tests.cluster.batch.batch_output_lab import Rows, chat, files, ids, job, tabled, write, wrong

# --- The manifest


def test_the_manifest_tells_what_the_files_are(tmp_path):
    out = tmp_path / "out.jsonl"
    results = [chat(0), wrong(1), wrong(2, code="b"), wrong(3)]
    manifest = write(out, ids(*"abcd"), results)
    assert manifest == read_manifest(str(out))
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["job"]["input_digest"] == "abc"
    assert (manifest.rows, manifest.errors) == (4, {"invalid_value": 2, "b": 1})
    assert (manifest.prompt_tokens, manifest.output_tokens) == (5, 2)
    for file in (manifest.output, manifest.error_file):
        data = (tmp_path / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert {path.name for path in tmp_path.iterdir()} == {
        "out.jsonl",
        "out.jsonl.errors.jsonl",
        "out.jsonl.manifest.json",
    }


def test_an_output_is_finished_when_it_fits_its_manifest_and_the_job(tmp_path):
    out = tmp_path / "out.jsonl"
    spec = OutputSpec(str(out), Style.OPENAI)
    assert not is_finished(spec, job(2)) and read_manifest(str(out)) is None
    write(out, ids("a", "b"), [chat(0), wrong(1)])
    assert is_finished(spec, job(2, created=7, version="later"))
    for other in ({"settings": "{ }"}, {"model": "x"}, {"input_digest": "x"}, {"fingerprint": "x"}):
        assert not is_finished(spec, job(2, **other))
    for name in ("out.jsonl", "out.jsonl.errors.jsonl"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(kept[:-1])
        assert not is_finished(spec, job(2))
        (tmp_path / name).unlink()
        assert not is_finished(spec, job(2))
        (tmp_path / name).write_bytes(kept)
    assert is_finished(spec, job(2))
    (tmp_path / "out.jsonl.manifest.json").write_bytes(b"{")
    with pytest.raises(BatchError, match="manifest"):
        is_finished(spec, job(2))


def test_an_output_of_another_style_is_not_finished(tmp_path):
    out = tmp_path / "out.jsonl"
    tabled(out, Rows({"q": 1}), [chat(0)])
    assert is_finished(OutputSpec(str(out), Style.COLUMNS), job(1))
    assert not is_finished(OutputSpec(str(out), Style.OPENAI), job(1))
    assert not is_finished(OutputSpec(str(out), Style.COLUMNS, "reply"), job(1))


def test_errors_of_an_earlier_run_are_removed(tmp_path):
    out = tmp_path / "out.jsonl"
    write(out, ids("a"), [wrong(0)])
    assert (tmp_path / "out.jsonl.errors.jsonl").exists()
    assert write(out, ids("a"), [chat(0)]).error_file is None
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()
    assert is_finished(OutputSpec(str(out), Style.OPENAI), job(1))


# --- What was there before


def test_what_no_batch_put_there_is_not_replaced(tmp_path):
    out = tmp_path / "out.jsonl"
    for name in ("out.jsonl", "out.jsonl.errors.jsonl"):
        (tmp_path / name).write_text('{"prompt": "the last of the inputs"}\n')
        before = files(tmp_path)
        with pytest.raises(BatchError, match=r"out\.jsonl .*is not what a batch put there.*another output"):
            refuse_replacing(str(out))
        with pytest.raises(BatchError, match="is not what a batch put there"):
            write(out, ids("a"), [chat(0)])
        assert files(tmp_path) == before
        (tmp_path / name).unlink()
    write(out, ids("a"), [chat(0)])


def test_what_a_batch_put_there_is_replaced_until_somebody_changes_it(tmp_path):
    out = tmp_path / "out.jsonl"
    refuse_replacing(str(out))
    write(out, ids("a", "b"), [chat(0), wrong(1)])
    refuse_replacing(str(out))
    write(out, ids("a", "b"), [chat(0, "other"), wrong(1)], of=job(2, settings="other"))
    with out.open("a") as file:
        file.write("a note of mine\n")
    with pytest.raises(BatchError, match="is not what a batch put there"):
        refuse_replacing(str(out))
    out.unlink()
    refuse_replacing(str(out))


def test_an_output_that_cannot_be_looked_at_is_told(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(BatchError, match=r"out\.jsonl cannot be looked at: Permission denied"):
        refuse_replacing(str(tmp_path / "out.jsonl"))


# --- Faults


@pytest.mark.parametrize("rows", [("a", "b"), ("a", "b", "c", "d"), ()])
def test_an_input_of_other_length_is_refused_and_leaves_nothing(tmp_path, rows):
    with pytest.raises(InputError, match="put it back"):
        write(tmp_path / "out.jsonl", ids(*rows), [chat(0), chat(1), chat(2)])
    assert files(tmp_path) == {}


def test_a_driver_that_was_taken_over_puts_nothing_in_place(tmp_path):
    write(tmp_path / "out.jsonl", ids("a"), [chat(0, "old")])
    before = files(tmp_path)

    def check():
        raise FencedError("another driver")

    with pytest.raises(FencedError):
        write(tmp_path / "out.jsonl", ids("a"), [chat(0, "new")], check=check)
    assert files(tmp_path) == before


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places.os, "fsync", full)
    with pytest.raises(BatchError, match=r"out\.jsonl cannot be written \(No space left on device\).*--resume"):
        write(tmp_path / "out.jsonl", ids("a"), [chat(0)])
    assert files(tmp_path) == {}


SUFFIXES = ("jsonl", "csv.gz", "parquet")
# In a process of its own: a child for each step of the work, killed there.
KILLS = """
import os, signal, sys
from pathlib import Path
import hashlib
from cluster.batch.io.manifest import is_finished, read_manifest, refuse_replacing
from tests.cluster.batch import batch_output_lab as t

def work(folder, suffix):
    results = [t.chat(0), t.wrong(1), t.chat(2, "bye")]
    t.tabled(folder / f"out.{suffix}", t.Rows({"q": 1}, {"q": 2}, {"q": 3}), results)

def killed_at(step, folder, suffix):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in {"os.rename", "os.remove"} or (event == "open" and str(folder) in str(args[0])):
            seen += 1
            if seen > step:
                os.kill(os.getpid(), signal.SIGKILL)
    pid = os.fork()
    if not pid:
        sys.addaudithook(hook)
        work(folder, suffix)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

root, suffix = Path(sys.argv[1]), sys.argv[2]
(root / "whole").mkdir()
work(root / "whole", suffix)
expected = t.files(root / "whole")
folder, step = root / "killed", 0
folder.mkdir()
old = t.job(3, settings="old")
t.tabled(folder / f"out.{suffix}", t.Rows({"q": 1}, {"q": 2}, {"q": 3}), [t.wrong(0), t.wrong(1), t.wrong(2)], of=old)
while killed_at(step, folder, suffix):
    step += 1
    found = t.files(folder)
    manifest = read_manifest(str(folder / f"out.{suffix}"))
    if manifest is not None:  # whatever it is of, it is of the files that are there
        for file in filter(None, (manifest.output, manifest.error_file)):
            assert hashlib.sha256(found[file.name]).hexdigest() == file.sha256, step
    refuse_replacing(str(folder / f"out.{suffix}"))
    whole = {name: data for name, data in found.items() if not name.endswith((".draft", ".claim"))}
    if is_finished(t.OutputSpec(str(folder / f"out.{suffix}"), t.Style.COLUMNS), t.job(3)):
        assert whole == expected, step
    else:
        assert whole.keys() <= expected.keys(), step
assert t.files(folder) == expected
print(step)
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_any_step_and_run_again_the_same_bytes_come_out(tmp_path, suffix):
    steps = int(subprocess.check_output([sys.executable, "-c", KILLS, str(tmp_path), suffix]))
    assert steps >= 10


# --- URLs


def test_an_output_behind_a_url_is_uploaded_when_it_is_whole(tmp_path):
    memory = fsspec.filesystem("memory")
    target = "memory://outputs/deep/out.jsonl"
    spec = OutputSpec(target, Style.OPENAI)
    try:
        assert not is_finished(spec, job(2))
        manifest = write(target, ids("a", "b"), [chat(0), wrong(1)], folder=tmp_path / "drafts")
        write(tmp_path / "out.jsonl", ids("a", "b"), [chat(0), wrong(1)])
        for name in ("out.jsonl", "out.jsonl.errors.jsonl", "out.jsonl.manifest.json"):
            assert memory.cat_file(f"/outputs/deep/{name}") == (tmp_path / name).read_bytes()
        assert read_manifest(target) == manifest and is_finished(spec, job(2))
        assert not list((tmp_path / "drafts").iterdir())
        write(target, ids("a", "b"), [chat(0), chat(1)], folder=tmp_path / "drafts")
        assert not memory.exists("/outputs/deep/out.jsonl.errors.jsonl") and is_finished(spec, job(2))
        memory.pipe_file("/outputs/deep/out.jsonl", b"short")
        assert not is_finished(spec, job(2))
        with pytest.raises(BatchError, match="is not what a batch put there"):
            refuse_replacing(target)
    finally:
        memory.rm("/outputs", recursive=True)


@pytest.mark.parametrize("target", ["memory://tried/out.jsonl", "{}/deep/out.jsonl"])
def test_whether_an_output_can_be_written_is_tried_and_leaves_nothing(tmp_path, monkeypatch, target):
    memory = fsspec.filesystem("memory")
    puts = []
    real = type(memory).put_file
    monkeypatch.setattr(type(memory), "put_file", lambda self, *given: (puts.append(given), real(self, *given)))
    try_output(target.format(tmp_path))
    assert len(puts) == target.startswith("memory")
    assert not memory.find("/tried")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_output_that_cannot_be_written_is_told_of_before_any_work(tmp_path, monkeypatch):
    class Refused(Exception):
        """As libraries for URLs raise them."""

    def refused(*_):
        raise Refused("403 Forbidden")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", refused)
    with pytest.raises(BatchError, match=r"memory://tried/out.jsonl cannot be written \(403 Forbidden\)"):
        try_output("memory://tried/out.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(BatchError, match=r"out.jsonl cannot be written \(Not a directory|File exists"):
        try_output(str(tmp_path / "file" / "out.jsonl"))


def test_memory_stays_the_same_for_twenty_times_the_rows(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from tests.cluster.batch import batch_output_lab as t\n"
        "def run(name, rows):\n"
        "    source = type('S', (), {'rows': lambda s: (t.SourceRow(n, 'x', {'q': 'abc ' * 20}, b'x' * 80)"
        " for n in range(rows))})()\n"
        "    batch = t.Finished(t.job(rows), source, t.PLAIN, (t.chat(n) for n in range(rows)))\n"
        "    t.write_output(t.OutputSpec(name, t.Style.COLUMNS), batch, Path('.'), lambda: None)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = run(sys.argv[1], 10_000); print(run(sys.argv[1], 200_000) - before)"
    )
    for suffix, most in (("jsonl.gz", 4_000), ("parquet", 12_000)):
        grown = int(subprocess.check_output([sys.executable, "-c", code, str(tmp_path / f"out.{suffix}")]))
        assert grown < most, suffix  # kB
