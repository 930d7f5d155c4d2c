"""The pass before any work: the same input has the same digest, and ids that cannot be told apart are refused."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch.errors import InputError
from cluster.batch.io import check
from cluster.batch.io.check import check_input
from cluster.batch.io.source import open_source
from cluster.batch.row_tasks import ColumnOptions, RowKind, task_maker

OPENAI = task_maker(RowKind.OPENAI, "demo")
PLAIN = task_maker(RowKind.PLAIN, "demo")


def checked(path, tasks=OPENAI, **more):
    return check_input(open_source([str(path)], path.parent), tasks, path.parent / "spill", **more)


def refused(path, tasks=OPENAI, **more):
    with pytest.raises(InputError) as caught:
        checked(path, tasks, **more)
    assert not list((path.parent / "spill").glob("*"))
    head, *lines = str(caught.value).splitlines()
    assert head == "the input cannot be used:"
    return [line.replace(f"{path}:", "data.jsonl:") for line in lines]


def data(tmp_path, ids):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps({'custom_id': one})}\n" if one != "bad" else "no\n" for one in ids))
    return path


def test_an_input_is_counted_and_digested(tmp_path):
    path = data(tmp_path, "abc")
    found = checked(path)
    assert (found.rows, found.unreadable) == (3, 0)
    assert checked(path) == found
    assert not list((tmp_path / "spill").glob("*"))


@given(
    st.lists(st.binary().filter(lambda b: b.strip() and b"\n" not in b and b"\r" not in b), min_size=1, max_size=5)
)
def test_the_digest_is_of_the_rows_and_where_each_ends(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("d")

    def digest(name, text):
        (folder / name).write_bytes(text)
        return checked(folder / name, PLAIN).digest

    lines = [b"x" + line for line in lines]  # not what a byte order mark begins with
    whole = digest("a.jsonl", b"\n".join(lines))
    assert digest("b.jsonl", b"\r\n\n".join(lines) + b"\n") == whole
    assert digest("c.jsonl", b"\n".join([*lines, b"x"])) != whole
    assert digest("d.jsonl", b"\n".join([lines[0][:1], lines[0][1:] + b"y", *lines[1:]])) != whole


def test_repeated_and_missing_ids_are_told_by_line(tmp_path):
    lines = refused(data(tmp_path, ["a", "x", "b", "a", None, "bad", 5, "b", "a"]))
    assert lines[:3] == [
        "custom_id 'a' at data.jsonl:4 is used at data.jsonl:1 already",
        "data.jsonl:5 has no custom_id",
        lines[2],
    ]
    assert lines[2].startswith("data.jsonl:6 has no custom_id: the line is no JSON object")
    assert lines[3:] == [
        "data.jsonl:7 has the custom_id 5, which must be text and not empty: 'row-1' is one",
        "custom_id 'b' at data.jsonl:8 is used at data.jsonl:3 already",
        "custom_id 'a' at data.jsonl:9 is used at data.jsonl:1 already",
    ]


def test_ten_are_told_and_the_others_counted(tmp_path):
    lines = refused(data(tmp_path, ["a"] * 30 + [None] * 30))
    assert len(lines) == 11 and lines[-1] == "and 49 more"
    assert lines[9] == "custom_id 'a' at data.jsonl:11 is used at data.jsonl:1 already"
    lines = refused(data(tmp_path, [None] * 30 + ["a"] * 30))
    assert lines[9:] == ["data.jsonl:10 has no custom_id", "and 49 more"]


@pytest.mark.parametrize("kind", [str, lambda text: [text]])
def test_little_is_told_of_long_ids(tmp_path, kind):
    told = refused(data(tmp_path, [kind("x" * 10**6)] * 11))
    assert len(told) >= 10 and all("'xxx" in line and "xxx..." in line for line in told[:10])
    assert sum(map(len, told)) < 5_000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=120), st.integers(1, 9), st.integers(1, 9))
def test_repeated_ids_are_found_whatever_is_spilled(tmp_path_factory, ids, spilled, read):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "ENTRIES_PER_SPILL", spilled)
        patch.setattr(check, "ENTRIES_PER_READ", read)
        patch.setattr(check, "PARTITIONS", 3)
        path = data(tmp_path_factory.mktemp("s"), [f"id-{one}" for one in ids])
        repeats = [(row, ids.index(one)) for row, one in enumerate(ids) if ids.index(one) < row]
        if not repeats:
            assert checked(path).rows == len(ids)
            return
        lines = refused(path)
    expected = [
        f"custom_id 'id-{ids[row]}' at data.jsonl:{row + 1} is used at data.jsonl:{first + 1} already"
        for row, first in repeats
    ]
    assert lines == [*expected[:10], *([f"and {len(expected) - 10} more"] if len(expected) > 10 else [])]


def test_plain_rows_need_no_ids_and_may_be_unreadable(tmp_path):
    found = checked(data(tmp_path, ["a", "a", "bad"]), PLAIN)
    assert (found.rows, found.unreadable) == (3, 1)


def test_plain_rows_with_an_id_column_are_told_apart_by_it(tmp_path):
    tasks = task_maker(RowKind.PLAIN, "demo", ColumnOptions(id_column="custom_id"))
    assert checked(data(tmp_path, ["a", "b", "bad", "bad", 1]), tasks).rows == 5
    assert refused(data(tmp_path, ["1", 1, True, ""]), tasks) == [
        "custom_id '1' at data.jsonl:2 is used at data.jsonl:1 already",
        "data.jsonl:3 has the custom_id True: the column 'custom_id' must hold text or a whole number",
        "data.jsonl:4 has no custom_id: there is nothing in its column 'custom_id'",
    ]


def test_columns_that_the_output_adds_are_refused(tmp_path):
    lines = refused(data(tmp_path, ["a", "b"]), PLAIN, reserved=["answer", "custom_id"])
    assert lines[0] == "data.jsonl:1 has a column 'custom_id', which the output adds: choose another name for it"
    assert checked(data(tmp_path, ["a"]), PLAIN, reserved=["answer"]).rows == 1


def test_an_input_without_rows_is_refused(tmp_path):
    for text in ("", "\n \n"):
        (tmp_path / "data.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"no rows: there is none in .*/data\.jsonl$"):
            checked(tmp_path / "data.jsonl")


def test_of_many_files_without_rows_the_first_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(9):
        (tmp_path / "data" / f"{number}.csv").write_text("prompt\n")
    with pytest.raises(InputError, match=r"none in .*/0\.csv, .*/1\.csv, .*/2\.csv and 6 more$"):
        checked(tmp_path / "data")


def test_what_a_killed_run_left_behind_counts_for_nothing(tmp_path):
    path = data(tmp_path, "abc")
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.cluster.batch import test_batch_check as t\n"
        "t.check._Ids.repeated = lambda self: (self._spill(), os.kill(os.getpid(), signal.SIGKILL))\n"
        "t.checked(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert list((tmp_path / "spill").glob("ids-*/*"))
    assert checked(path).rows == 3


def test_memory_stays_the_same_for_twenty_times_the_rows(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from tests.cluster.batch import test_batch_check as t\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "t.checked(Path(sys.argv[1])); before = peak()\n"
        "assert t.checked(Path(sys.argv[2])).rows == 200_000; print(peak() - before)"
    )
    body = {"messages": [{"role": "user", "content": "hello " * 10}], "max_tokens": 5}
    paths = [tmp_path / "10k.jsonl", tmp_path / "200k.jsonl"]
    for path, rows in zip(paths, (10_000, 200_000), strict=True):
        with path.open("w") as file:
            for number in range(rows):
                fields = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions"}
                file.write(json.dumps({**fields, "body": body}) + "\n")
    grown = int(subprocess.check_output([sys.executable, "-c", code, *map(str, paths)]))
    assert grown < 4000  # kB
