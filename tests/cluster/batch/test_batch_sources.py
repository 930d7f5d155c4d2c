"""Inputs of a batch: every line is a row or a problem of its own, in one order, in little memory."""

import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.errors import InputError
from cluster.batch.io import reading
from cluster.batch.io.paths import refuse_output
from cluster.batch.io.source import open_source

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def rows_of(*inputs, spool=Path("nowhere"), **more):
    return list(open_source([str(one) for one in inputs], spool, **more).rows())


def fields_of(*inputs, **more):
    return [row.fields for row in rows_of(*inputs, **more)]


def written(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refused(*inputs, **more):
    with pytest.raises(InputError) as caught:
        rows_of(*inputs, **more)
    return str(caught.value)


# --- JSON lines


@given(
    st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6), st.sampled_from(["\n", "\r\n", "\n\n \n"])
)
def test_json_lines_come_back_as_they_were_written(tmp_path_factory, rows, end):
    path = tmp_path_factory.mktemp("j") / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=len(rows) % 2 == 0).encode() for row in rows]
    path.write_bytes(end.encode().join(lines))
    assert [(row.fields, row.raw) for row in rows_of(path)] == list(zip(rows, lines, strict=True))


def test_lines_are_numbered_as_in_the_file_and_rows_through_all_files(tmp_path):
    a = written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"x":1}\n\n \t\r\n{"x":2}\r\n')
    b = written(tmp_path / "b.ndjson", '{"x":3}')
    found = [(row.number, row.place, row.fields) for row in rows_of(a, b)]
    assert found == [(0, f"{a}:1", {"x": 1}), (1, f"{a}:4", {"x": 2}), (2, f"{b}:1", {"x": 3})]


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"12", b'{"a":', b'{"a": NaN}', b'{"a": "\xff"}', b"{'a': 1}", b"[" * 100_000, b'{"a":1} {"b":2}'],
)
def test_a_line_that_is_no_object_is_one_row_with_a_problem(tmp_path, line):
    path = written(tmp_path / "a.jsonl", b'{"x":1}\n' + line + b'\n{"x":2}\n')
    first, bad, last = rows_of(path)
    assert (first.fields, last.fields) == ({"x": 1}, {"x": 2})
    assert bad.fields is None and "no JSON object" in bad.problem and bad.place == f"{path}:2" and bad.raw == line


def test_a_line_over_the_limit_is_a_problem_and_is_not_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"x":1}\n{"x":"')
        for _ in range(30):
            file.write(b"a" * 2**20)
        file.write(b'"}\n{"x":2}\n')
    tracemalloc.start()
    first, long, last = rows_of(path, limit=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.fields, long.fields, last.fields) == ({"x": 1}, None, {"x": 2})
    assert "longer than 1048576 bytes" in long.problem
    assert peak < 8 << 20
    changed = path.read_bytes().replace(b'a"}', b'b"}')
    assert rows_of(written(tmp_path / "b.jsonl", changed), limit=1 << 20)[1].raw != long.raw


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_limit_is_exact(tmp_path, over, end):
    line = b'{"x":"' + b"a" * (100 - 8 + over) + b'"}'
    (row,) = rows_of(written(tmp_path / "a.jsonl", line + end), limit=100)
    assert (row.fields is None) == bool(over)


@pytest.mark.parametrize("text", ['[\n{"a":1}\n]', '{\n"a":1\n}', '[{"a":1}]'])
def test_a_json_file_that_is_one_value_is_refused_with_what_to_do(tmp_path, text):
    path = written(tmp_path / "a.json", text)
    assert "jq -c" in refused(path)


def test_a_json_file_of_lines_is_read(tmp_path):
    assert fields_of(written(tmp_path / "a.json", '{"a":1}\n{"a":2}\n')) == [{"a": 1}, {"a": 2}]


def test_text_is_a_row_per_line(tmp_path):
    path = written(tmp_path / "a.txt.gz", gzip.compress(b"one\n\n two \r\n\xff\n" + b"x" * 101))
    found = rows_of(path, limit=100)
    assert [row.fields for row in found] == [{"text": "one"}, {"text": " two "}, None, None]
    assert [row.place for row in found] == [f"{path}:{line}" for line in (1, 3, 4, 5)]
    assert "not UTF-8" in found[2].problem and "longer than 100" in found[3].problem


# --- CSV


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=2), max_size=6))
def test_csv_comes_back_as_it_was_written(tmp_path_factory, records):
    import csv

    path = tmp_path_factory.mktemp("c") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *records])
    assert fields_of(path) == [{"a": a, "b": b} for a, b in records]


def test_csv_records_over_lines_are_placed_at_their_first(tmp_path):
    path = written(tmp_path / "a.csv", '\ufeffid,text\n1,"two\nlines, and ""quotes"""\n\n2,x\r\n')
    found = [(row.place, row.fields) for row in rows_of(path)]
    assert found == [
        (f"{path}:2", {"id": "1", "text": 'two\nlines, and "quotes"'}),
        (f"{path}:5", {"id": "2", "text": "x"}),
    ]


def test_csv_records_that_do_not_fit_have_problems_of_their_own(tmp_path):
    path = written(tmp_path / "a.csv", b'a,b\n1\n1,2,3\n"x"y,2\n\xff,2\n5,6\n7,"open')
    found = rows_of(path)
    assert [row.fields for row in found] == [None, None, None, None, {"a": "5", "b": "6"}, None]
    problems = [row.problem for row in found]
    assert "1 columns" in problems[0] and "3 columns" in problems[1] and "no CSV" in problems[2]
    assert problems[3] == "it is not UTF-8" and "unexpected end" in problems[5]
    assert [row.place for row in found] == [f"{path}:{line}" for line in range(2, 8)]
    assert len({row.raw for row in found}) == 6


def test_csv_values_may_be_long(tmp_path):
    (row,) = rows_of(written(tmp_path / "a.csv", "a\n" + "x" * 300_000))
    assert len(row.fields["a"]) == 300_000


@pytest.mark.parametrize("header", ["a,a", "a,", '"a'])
def test_csv_headers_must_name_each_column_once(tmp_path, header):
    path = written(tmp_path / "a.csv", f"{header}\n1,2\n")
    assert str(path) in refused(path)


@pytest.mark.parametrize("header", ["x" * 10**6 + ",a,a", ",".join(["a"] * 10**5)])
def test_little_is_told_of_long_csv_headers(tmp_path, header):
    assert len(refused(written(tmp_path / "a.csv", f"{header}\n"))) < 2_000


def test_csv_records_without_end_are_not_held(tmp_path):
    path = written(tmp_path / "a.csv", 'a\n1\n"' + "line\n" * 200_000)
    assert f"{path}:3: this record has no end within 100000 bytes" in refused(path, limit=100_000)


# --- Compression


def zst(data, level=3):
    return zstandard.ZstdCompressor(level=level).compress(data)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.GZ", "a.ndjson.zst"])
def test_compressed_files_are_read_also_in_several_members(tmp_path, name):
    head, rest = ("x\n", "1\n2\n3\n") if "csv" in name else ("", '{"x":"1"}\n{"x":"2"}\n{"x":"3"}\n')
    pack = gzip.compress if name.lower().endswith("gz") else zst
    path = written(tmp_path / name, pack(head.encode()) + pack(rest[:7].encode()) + pack(rest[7:].encode()))
    assert fields_of(path) == [{"x": "1"}, {"x": "2"}, {"x": "3"}]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "not at all"])
def test_damaged_compressed_files_are_refused_by_name(tmp_path, kind, damage):
    plain = b"".join(b'{"x":"%s"}\n' % os.urandom(20).hex().encode() for _ in range(2000))
    data = bytearray(
        gzip.compress(plain) if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    )
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(plain)
    path = written(tmp_path / f"a.jsonl.{kind}", bytes(data))
    message = refused(path)
    assert str(path) in message and "damaged or cut short" in message


def test_zstd_that_swells_stays_small_in_memory(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
        for _ in range(300):
            file.write(b" " * 2**20)
        file.write(b'\n{"x":1}\n')
    code = (
        "import resource, sys; from pathlib import Path; from cluster.batch.io.source import open_source\n"
        "rows = list(open_source([sys.argv[1]], Path('.'), limit=1 << 20).rows()); assert len(rows) == 2\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    small = written(tmp_path / "b.jsonl.zst", zst(b" " * 2**21 + b'\n{"x":1}\n'))
    peaks = [int(subprocess.check_output([sys.executable, "-c", code, str(one)])) for one in (small, path)]
    assert peaks[1] - peaks[0] < 60_000  # kB, of 300 MiB


def test_zstd_that_asks_for_a_large_window_is_refused_by_name(tmp_path):
    params = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, enable_ldm=False)
    path = tmp_path / "a.jsonl.zst"
    with path.open("wb") as raw, zstandard.ZstdCompressor(compression_params=params).stream_writer(raw) as file:
        file.write(b'{"x":1}\n')
    told = refused(path)
    assert str(path) in told and "128 MiB" in told and "--long" in told


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(reading.importlib, "import_module", missing)
    path = written(tmp_path / "a.jsonl.zst", zst(b'{"x":1}\n'))
    message = refused(path)
    assert "pip install -e '.[data]' in Squadron's folder" in message
    assert "zstandard" in message and str(path) in message


# --- Where files lie


def test_directories_are_sorted_and_leave_hidden_files_out(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.jsonl", ".hidden.jsonl", ".git/d.jsonl", "_SUCCESS", "_tmp/e.jsonl"):
        text = json.dumps({"name": name}).encode()
        written(tmp_path / name, gzip.compress(text) if name.endswith("gz") else text)
    assert fields_of(tmp_path) == [{"name": "a.jsonl.gz"}, {"name": "b.jsonl"}, {"name": "sub/c.jsonl"}]
    assert fields_of(f"file://{tmp_path}") == fields_of(tmp_path)


def test_patterns_are_sorted(tmp_path):
    for name in ("b2", "b10", "a", ".b0"):
        written(tmp_path / f"{name}.jsonl", json.dumps({"name": name}))
    written(tmp_path / "b.txt", "no")
    assert fields_of(tmp_path / "b*.jsonl") == [{"name": "b10"}, {"name": "b2"}]
    assert "holds no file" in refused(tmp_path / "z*.jsonl")


def test_a_file_may_have_a_name_like_a_pattern(tmp_path):
    assert fields_of(written(tmp_path / "a[1].jsonl", '{"x":1}')) == [{"x": 1}]


def test_urls_are_read_by_fsspec(tmp_path):
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe(
            {"/in/b.jsonl": b'{"x":2}\n', "/in/a.jsonl.gz": gzip.compress(b'{"x":1}'), "/in/.no.jsonl": b"no"}
        )
        assert fields_of("memory://in/b.jsonl") == [{"x": 2}]
        assert fields_of("memory://in/*.jsonl") == [{"x": 2}]
        found = rows_of("memory://in")
        assert [row.fields for row in found] == [{"x": 1}, {"x": 2}]
        assert found[0].place == "memory:///in/a.jsonl.gz:1"
        assert "is not there" in refused("memory://in/none.jsonl")
        assert "holds no file" in refused("memory://in/*.csv")
    finally:
        memory.rm("/in", recursive=True)


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    assert f"{tmp_path}/none.jsonl is not there" in refused(tmp_path / "none.jsonl")
    assert "nosuch://x" in refused("nosuch://x/a.jsonl")
    for name in ("a.doc", "a.avro", "a.orc", "a.tfrecord", "a.tfrecords", "a.parquet.gz", "README"):
        unknown = refused(written(tmp_path / name, ""))
        assert f"{name} cannot be read: its name must end in .jsonl, " in unknown
        assert " .csv, " in unknown and " .parquet; convert" in unknown
    (tmp_path / "empty").mkdir()
    assert "holds no file" in refused(tmp_path / "empty")
    a = written(tmp_path / "a.jsonl", "{}")
    assert "named twice" in refused(a, a)
    assert "no input" in refused()


def test_a_file_is_named_once_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "data/a.jsonl", '{"x":1}\n')
    (tmp_path / "linked").symlink_to("data")
    for other in ("./data/a.jsonl", f"file://{tmp_path}/data/a.jsonl", "linked/a.jsonl"):
        assert "named twice, the first time as data/a.jsonl;" in refused("data/a.jsonl", other)
    assert "named twice" in refused("data", "data/a.jsonl")
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe_file("/in/a.jsonl", b'{"x":1}\n')
        assert "named twice" in refused("memory://in/a.jsonl", "memory:///in/a.jsonl")
    finally:
        memory.rm("/in", recursive=True)


@pytest.mark.parametrize(
    ("given", "output", "among"),
    [
        ("data", "data/out.jsonl", True),
        ("data/", "data/deep/../out.jsonl", True),
        ("data/a.jsonl", "./data/a.jsonl", True),
        ("data/*.jsonl", "data/out.jsonl", True),
        ("s3://b/data", "s3://b/data/out.jsonl", True),
        ("data", "data2/out.jsonl", False),
        ("data/**/*.jsonl", "data/out.jsonl", True),
        ("data/**/*.jsonl", "data/a/b/out.jsonl", True),
        ("data/a**/*.jsonl", "data/ab/out.jsonl", True),
        ("data/*.jsonl", "data/out.csv", True),  # with out.csv.errors.jsonl
        ("data/*.json", "data/out.jsonl", True),  # with out.jsonl.manifest.json
        ("s3://b/data/*.jsonl", "s3://b/data/out.jsonl", True),
        ("s3://b/**/a*.jsonl", "s3://b/data/deep/a.jsonl", True),
        ("data/*/*.jsonl", "data/linked/out.jsonl", True),
        ("data/linked/*.jsonl", "other/out.jsonl", True),
        ("data/b[1].jsonl", "data/b[1].jsonl", True),
        ("data/b[1].jsonl", "data/b1.jsonl", False),  # a file of that name
        ("data/a**/*.jsonl", "data/a/b/c/out.jsonl", False),
        ("data/*.csv", "data/out.jsonl", False),
        ("s3://b/data/*.jsonl", "s3://b/data/deep/out.jsonl", False),
        ("s3://b/data/*.jsonl", "b/data/out.jsonl", False),
        ("data/*.jsonl", "out/out.jsonl", False),
        ("data/a.jsonl", "data/out.jsonl", False),
        ("s3://b/data", "s3://b/data2/out.jsonl", False),
        ("-", "out.jsonl", False),
    ],
)
def test_an_output_may_not_lie_among_the_inputs(tmp_path, monkeypatch, given, output, among):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "data/b[1].jsonl", "{}")
    (tmp_path / "data/linked").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match="would be part of the input") if among else nullcontext():
        refuse_output(["other.jsonl", given], output)


def test_a_file_that_changes_between_readings_is_refused(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"x":1}\n')
    source = open_source([str(path)], tmp_path)
    assert list(source.rows()) == list(source.rows())
    written(path, '{"x":1}\n{"x":2}\n')
    with pytest.raises(InputError, match=r"a\.jsonl has changed"):
        list(source.rows())
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read"):
        list(source.rows())


def test_a_file_behind_a_url_that_changes_between_readings_is_refused(tmp_path):
    memory = fsspec.filesystem("memory")
    try:
        for other in (b'{"x":1}\n{"x":2}\n', b'{"x":2}\n'):  # of another size, or the same
            memory.pipe_file("/in/a.jsonl", b'{"x":1}\n')
            source = open_source(["memory://in"], tmp_path)
            assert list(source.rows()) == list(source.rows())
            memory.pipe_file("/in/a.jsonl", other)
            with pytest.raises(InputError, match=r"a\.jsonl has changed"):
                list(source.rows())
        memory.rm_file("/in/a.jsonl")
        with pytest.raises(InputError, match=r"a\.jsonl cannot be read"):
            list(source.rows())
    finally:
        memory.store.pop("/in/a.jsonl", None)


def test_an_object_that_is_written_while_it_is_read_is_refused(tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    told = {"name": "/in/a.jsonl", "size": 8, "type": "file", "ETag": "one", "atime": 0}
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: told)
    try:
        memory.pipe_file("/in/a.jsonl", b'{"x":1}\n')
        source = open_source(["memory://in/a.jsonl"], tmp_path)
        rows = source.rows()
        next(rows)
        told["atime"] = 1  # as reading changes it
        assert next(rows, None) is None
        rows = source.rows()
        next(rows)
        told["ETag"] = "two"
        with pytest.raises(InputError, match=r"a\.jsonl has changed while it was read"):
            next(rows)
    finally:
        memory.store.pop("/in/a.jsonl", None)


# --- Standard input


class Terminal(io.BytesIO):
    def isatty(self):
        return True


def test_standard_input_can_be_read_again(tmp_path):
    source = open_source(["-"], tmp_path, io.BytesIO(b'{"x":1}\n{"x":2}\n'))
    assert [row.place for row in source.rows()] == ["stdin.jsonl:1", "stdin.jsonl:2"]
    assert [row.fields for row in source.rows()] == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("stream", [io.BytesIO(), Terminal(b"never read"), io.BytesIO(b'{"x":1}\n')])
def test_a_later_run_uses_what_was_kept(tmp_path, stream):
    open_source(["-"], tmp_path, io.BytesIO(b'{"x":1}\n'))
    for begun in (False, True):
        stream.seek(0)
        assert fields_of("-", spool=tmp_path, stdin=stream, begun=begun) == [{"x": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["stdin.jsonl"]


@pytest.mark.parametrize("data", [b'{"x":2}\n', b'{"x":1}\n{"x":2}\n', b'{"x":1'])
def test_a_later_run_is_refused_other_rows_than_were_begun(tmp_path, data):
    open_source(["-"], tmp_path, io.BytesIO(b'{"x":1}\n'))
    assert "is not what the first run" in refused("-", spool=tmp_path, stdin=io.BytesIO(data), begun=True)
    assert fields_of("-", spool=tmp_path, stdin=io.BytesIO(), begun=True) == [{"x": 1}]


def test_rows_that_were_never_begun_are_replaced(tmp_path):
    open_source(["-"], tmp_path, io.BytesIO(b'{"x":1}\n'))
    assert fields_of("-", spool=tmp_path, stdin=io.BytesIO(b'{"x":2}\n')) == [{"x": 2}]


def test_what_was_kept_by_half_is_kept_anew(tmp_path):
    class Dies(io.BytesIO):
        def read(self, size=-1):
            return super().read(3) or exec("raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        open_source(["-"], tmp_path, Dies(b'{"x":1}\n'))
    assert fields_of("-", spool=tmp_path, stdin=io.BytesIO(b'{"x":2}\n')) == [{"x": 2}]


def test_standard_input_of_other_formats(tmp_path):
    stream = io.BytesIO(gzip.compress(b"x\n1\n"))
    assert fields_of("-", spool=tmp_path, stdin=stream, stdin_suffix=".csv.gz") == [{"x": "1"}]
    assert "stdin.doc cannot be read" in refused("-", spool=tmp_path, stdin=io.BytesIO(b"x"), stdin_suffix=".doc")


def test_standard_input_without_rows_is_refused(tmp_path):
    assert "terminal" in refused("-", spool=tmp_path, stdin=Terminal())
    assert "empty" in refused("-", spool=tmp_path, stdin=io.BytesIO())
    assert "named twice" in refused("-", "-", spool=tmp_path, stdin=io.BytesIO(b"{}"))
