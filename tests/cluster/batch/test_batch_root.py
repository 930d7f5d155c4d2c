"""The place where files and batches are kept: a directory or a URL."""

import threading

import pytest

from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from engine.errors import ConfigError
from tests.cluster.batch.store_lab import keep


def test_of_many_that_create_a_file_one_does(tmp_path):
    root, told, admission = open_root(str(tmp_path)), [], threading.Barrier(8)

    def create(number):
        admission.wait()
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

    monkeypatch.setattr("cluster.batch.server.root.shutil.copyfileobj", broken)
    with pytest.raises(OSError, match="the line is cut"):
        draft.put("files/x/content")
    draft.discard()
    assert root.names("files/x") == []


def test_the_root_lies_where_it_was_told(tmp_path):
    store = Store(open_root(f"file://{tmp_path}/deep/er"), 1)
    stored = keep(store)
    assert (tmp_path / "deep" / "er" / "files" / stored.id / "content").read_bytes() == b"{}\n"
