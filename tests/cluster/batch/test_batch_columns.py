"""Inputs that hold values rather than text: in the order of the file, in little memory, refused by name."""

import datetime
import decimal
import io
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from cluster.batch.errors import InputError
from cluster.batch.io.check import check_input
from cluster.batch.io.manifest import OutputSpec, Style
from cluster.batch.io.output_files import Finished, write_output
from cluster.batch.io.source import open_source
from cluster.batch.ledger.records import Job, RowDone
from cluster.batch.row_tasks import ColumnOptions, RowKind, kind_of, task_maker


def source_of(*paths, **more):
    return open_source([str(path) for path in paths], Path("nowhere"), **more)


def fields_of(*paths):
    return [row.fields for row in source_of(*paths).rows()]


def parquet(path, rows, **more):
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, **more)
    return path


def test_rows_come_in_the_order_of_the_files_in_every_reading(tmp_path):
    rows = [{"n": number, "prompt": f"say {number}"} for number in range(20_000)]
    parquet(tmp_path / "b.parquet", rows[8000:], row_group_size=300)
    parquet(tmp_path / "a.parquet", rows[:8000], row_group_size=1000)
    source = source_of(tmp_path)
    first = list(source.rows())
    assert [row.fields for row in first] == rows
    assert [row.number for row in first] == list(range(20_000))
    assert first[8000].place == f"{tmp_path}/b.parquet row 1"
    assert list(source.rows()) == first


def test_values_of_every_kind_become_a_row(tmp_path):
    row = {
        "text": "ü",
        "none": None,
        "float": float("nan"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "long": datetime.timedelta(seconds=5),
        "exact": decimal.Decimal("1.50"),
        "bytes": b"text",
        "binary": b"\xff\x00",
        "nested": {"a": [1, None], "b": [{"c": "x"}]},
    }
    (found,) = source_of(parquet(tmp_path / "a.parquet", [row])).rows()
    assert found.fields["float"] != found.fields["float"]
    assert {**found.fields, "float": 0} == {**row, "bytes": "text", "float": 0}
    assert json.loads(found.raw)["exact"] == "1.50"


def test_a_row_over_the_limit_is_a_problem(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"p": "x"}, {"p": "x" * 100}, {"p": "y"}])
    found = list(source_of(path, limit=50).rows())
    assert [row.fields for row in found] == [{"p": "x"}, None, {"p": "y"}]
    assert "longer than 50 bytes" in found[1].problem


def test_requests_in_parquet_are_requests(tmp_path):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source = source_of(parquet(tmp_path / "a.parquet", [request]))
    assert kind_of(source) is RowKind.OPENAI
    task = task_maker(RowKind.OPENAI, "demo").task(next(iter(source.rows())))
    assert task.body == {**body, "model": "demo"} and not task.problem


@pytest.mark.parametrize("damage", ["other", "empty", "cut", "flipped"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    rows = [{"prompt": f"{number}", "n": number} for number in range(5000)]
    data = bytearray(parquet(tmp_path / "whole", rows).read_bytes())
    if damage == "other":
        data = bytearray(b"not at all" * 100)
    elif damage == "empty":
        data = bytearray()
    elif damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[2] ^= 0xFF
        data[-2] ^= 0xFF
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet (is damaged|cannot be read)"):
        fields_of(tmp_path / "a.parquet")


def test_columns_are_read_behind_urls_and_from_standard_input(tmp_path):
    kept = parquet(tmp_path / "a.parquet", [{"prompt": "x"}]).read_bytes()
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe_file("/in/a.parquet", kept)
        assert fields_of("memory://in/a.parquet") == [{"prompt": "x"}]
    finally:
        memory.rm("/in", recursive=True)
    source = open_source(["-"], tmp_path, io.BytesIO(kept), stdin_suffix=".parquet")
    assert [(row.fields, row.place) for row in source.rows()] == [({"prompt": "x"}, "stdin.parquet row 1")]


def test_repeated_ids_are_refused_by_row(tmp_path):
    rows = [{"id": 1, "prompt": "x"}, {"id": 2, "prompt": "x"}, {"id": 1, "prompt": "y"}]
    path = parquet(tmp_path / "a.parquet", rows)
    tasks = task_maker(RowKind.PLAIN, "demo", ColumnOptions(id_column="id"))
    with pytest.raises(
        InputError, match=r"custom_id '1' at .*a\.parquet row 3 is used at .*a\.parquet row 1 already"
    ):
        check_input(source_of(path), tasks, tmp_path / "spill")


def test_parquet_comes_out_as_it_went_in_with_the_answer(tmp_path):
    row = {"prompt": "x", "tags": ["a"], "score": 1.5, "when": datetime.datetime(2026, 1, 2)}
    rows = [row, {**dict.fromkeys(row), "prompt": "y"}]
    source = source_of(parquet(tmp_path / "in.parquet", rows))
    tasks = task_maker(RowKind.PLAIN, "demo")
    checked = check_input(source, tasks, tmp_path / "spill")
    job = Job(
        rows=checked.rows, input_digest=checked.digest, model="m", fingerprint="", settings="", created=0, version=""
    )
    results = [RowDone(row, 200, b'{"choices":[{"text":"t","finish_reason":"stop"}]}', 3, 4) for row in range(2)]
    spec = OutputSpec(str(tmp_path / "out.parquet"), Style.COLUMNS)
    write_output(spec, Finished(job, source, tasks, iter(results)), tmp_path, lambda: None)
    answer = {"answer": "t", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 4, "answer_details": None}
    found = pa.parquet.read_table(tmp_path / "out.parquet")
    assert found.to_pylist() == [{**row, **answer} for row in rows]
    before = pa.parquet.read_schema(tmp_path / "in.parquet")
    assert found.schema.types[:4] == before.types


def test_memory_stays_the_same_for_twenty_times_the_rows(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from cluster.batch.io.source import open_source\n"
        "def peak(path):\n"
        "    assert sum(1 for _ in open_source([path], Path('.')).rows()) in (10_000, 200_000)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(sys.argv[1]); print(peak(sys.argv[2]) - before)"
    )
    paths = [tmp_path / "few.parquet", tmp_path / "many.parquet"]
    for path, rows in zip(paths, (10_000, 200_000), strict=True):
        parquet(path, [{"prompt": f"{number} " * 20} for number in range(rows)], row_group_size=5000)
    grown = int(subprocess.check_output([sys.executable, "-c", code, *map(str, paths)]))
    assert grown < 8_000  # kB, of 25 MB of text


def _peak(path, rows):
    """Megabytes that reading a file takes, beside those of an empty one."""
    code = (
        "import resource, sys; from pathlib import Path; from cluster.batch.io.source import open_source\n"
        "def peak(path, rows):\n"
        "    assert sum(len(row.raw) > 10 for row in open_source([path], Path('.')).rows()) == rows\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(sys.argv[1], 1); print((peak(sys.argv[2], int(sys.argv[3])) - before) // 1024)"
    )
    usual = parquet(path.parent / "usual.parquet", [{"prompt": "say something"}])
    return int(subprocess.check_output([sys.executable, "-c", code, str(usual), str(path), str(rows)]))


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_the_file_holds_once_is_in_memory_once(tmp_path, nested):
    """256 rows of 8 MB, which are 8 MB in the file."""
    said = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["say " * (2 << 20)]))
    if nested:
        said = pa.ListArray.from_arrays(pa.array(range(257), pa.int32()), said)
    path = tmp_path / "in.parquet"
    pa.parquet.write_table(pa.table({"prompt": said}), path, dictionary_pagesize_limit=64 << 20)
    assert path.stat().st_size < 20 << 20
    assert _peak(path, 256) < 200


def test_long_values_are_decoded_a_few_rows_at_a_time(tmp_path):
    """64 rows of 8 MB each, which compress to next to nothing."""
    rows = [{"prompt": f"{number}" + "say " * (2 << 20)} for number in range(64)]
    path = parquet(tmp_path / "in.parquet", rows, use_dictionary=False, compression="zstd")
    assert path.stat().st_size < 1 << 20
    assert _peak(path, 64) < 250
