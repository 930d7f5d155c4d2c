"""What an output of a batch holds: each row once, as OpenAI has it or in columns of every format."""

import csv
import datetime
import gzip
import io
import json
import re

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.io.manifest import OutputSpec, Style, default_style
from cluster.batch.io.source import open_source
from cluster.batch.ledger.records import RowDone
from cluster.batch.row_tasks import ColumnOptions, RowKind, task_maker
from engine.errors import ConfigError
from tests.cluster.batch.batch_output_lab import OPENAI, PLAIN, Rows, chat, ids, job, lines, tabled, write, wrong

# --- OpenAI's lines


def test_answers_and_errors_are_in_files_of_their_own_as_openai_has_them(tmp_path):
    out = tmp_path / "out.jsonl"
    write(out, ids("a", "b", "c"), [chat(0), wrong(1), chat(2)])
    first, last = lines(out)
    (error,) = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert (first["custom_id"], last["custom_id"], error["custom_id"]) == ("a", "c", "b")
    assert first == {
        "id": first["id"],
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": first["id"].replace("batch_req_", "req_"),
            "body": json.loads(chat(0).body),
        },
        "error": None,
    }
    assert error["response"]["status_code"] == 400 and error["response"]["body"] == json.loads(wrong(1).body)
    assert error["error"] is None
    numbers = {one["id"] for one in (first, last, error)}
    assert len(numbers) == 3 and all(re.fullmatch(r"batch_req_[0-9a-f]{24}", number) for number in numbers)


def test_a_row_that_was_never_asked_has_no_response(tmp_path):
    write(tmp_path / "out.jsonl", ids("a"), [wrong(0, status=0, code="batch_expired")])
    (error,) = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert error["response"] is None
    assert error["error"] == {"code": "batch_expired", "message": "row 0 is wrong"}
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_the_ids_follow_from_the_job_and_not_from_its_time(tmp_path):
    def numbers(**more):
        write(tmp_path / "out.jsonl", ids("a", "b"), [chat(0), chat(1)], of=job(2, **more))
        return [one["id"] for one in lines(tmp_path / "out.jsonl")]

    assert numbers() == numbers(created=5, version="9")
    assert not set(numbers()) & set(numbers(settings='{"seed":1}'))


def test_a_body_over_lines_stays_one_line(tmp_path):
    done = RowDone(0, 200, b'{\n "choices": [],\n "x": "a\\nb"\n}')
    write(tmp_path / "out.jsonl", ids("a"), [done])
    assert lines(tmp_path / "out.jsonl")[0]["response"]["body"] == {"choices": [], "x": "a\nb"}


def test_plain_rows_are_named_by_number_or_column(tmp_path):
    source = Rows({"k": "x"}, {"k": 7}, None)
    for tasks, names in (
        (PLAIN, ["row-1", "row-2", "row-3"]),
        (task_maker(RowKind.PLAIN, "demo", ColumnOptions(id_column="k")), ["x", "7", "row-3"]),
    ):
        write(tmp_path / "out.jsonl", source, [chat(0), chat(1), wrong(2)], tasks)
        found = [*lines(tmp_path / "out.jsonl"), *lines(tmp_path / "out.jsonl.errors.jsonl")]
        assert [one["custom_id"] for one in found] == names


# --- Columns


def test_the_answer_stands_beside_the_inputs_columns(tmp_path):
    source = Rows({"prompt": "x", "tags": ["a"], "big": 2**70}, {"prompt": "y", "new": None}, {"prompt": "z"})
    tabled(tmp_path / "out.jsonl", source, [chat(0), chat(1, "ü"), wrong(2)])
    figures = {"finish_reason": "stop", "prompt_tokens": 5, "output_tokens": 2}
    assert lines(tmp_path / "out.jsonl") == [
        {"prompt": "x", "tags": ["a"], "big": 2**70, "answer": "hi", **figures},
        {"prompt": "y", "new": None, "answer": "ü", **figures},
    ]


@pytest.mark.parametrize("style", list(Style))
def test_errors_of_columns_tell_where_the_row_lies_and_those_of_requests_are_as_openai_has_them(tmp_path, style):
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors.jsonl"
    write(out, ids("a", "b"), [chat(0), wrong(1)], OPENAI, style)
    (of_request,) = lines(errors)
    write(out, Rows({"prompt": "x"}, {"prompt": "y"}), [wrong(0), wrong(1, status=0)], PLAIN, style)
    found = lines(errors)
    assert list(of_request) == ["id", "custom_id", "response", "error"]
    assert [list(one) for one in found] == [["id", "custom_id", "response", "error", "place"]] * 2
    assert [(one["custom_id"], one["place"]) for one in found] == [("row-1", "x:1"), ("row-2", "x:2")]
    (tmp_path / "rows.csv").write_text("prompt\nx\n\ny\n")
    write(out, open_source([str(tmp_path / "rows.csv")], tmp_path), [chat(0), wrong(1)], PLAIN, style)
    assert lines(errors)[0]["place"] == f"{tmp_path}/rows.csv:4"


@pytest.mark.parametrize(
    ("body", "answer", "reason"),
    [
        ({"choices": [{"text": "a", "finish_reason": "length"}]}, "a", "length"),
        (
            {"choices": [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}]},
            ["a", "b"],
            ["stop", "length"],
        ),
        ({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}, None, "stop"),
        ({"choices": [{"message": {"content": None, "tool_calls": [{"id": 1}]}}]}, '[{"id":1}]', None),
        ({"data": [{"embedding": [0.5, 1.0]}]}, [0.5, 1.0], None),
        ({"data": [{"embedding": [0.5]}, {"embedding": "AAA="}]}, [[0.5], "AAA="], None),
    ],
)
def test_answers_of_every_kind_become_one_value(tmp_path, body, answer, reason):
    tabled(
        tmp_path / "out.jsonl", Rows({"q": 1}), [RowDone(0, 200, json.dumps(body).encode())], answer_column="reply"
    )
    (found,) = lines(tmp_path / "out.jsonl")
    assert (found["reply"], found["finish_reason"]) == (answer, reason)
    assert "reply_details" not in found


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
SCORES = {"content": [{"token": "I", "logprob": -0.5, "bytes": [73], "top_logprobs": []}]}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 9,
    "total_tokens": 14,
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def message(content, **more):
    return {"role": "assistant", "content": content, "refusal": None, **more}


@pytest.mark.parametrize(
    ("body", "answer", "details"),
    [
        ({"choices": [{"message": message("I look.", tool_calls=CALLS)}]}, "I look.", {"tool_calls": CALLS}),
        (
            {"choices": [{"message": message(None, tool_calls=CALLS, reasoning_content="Hm."), "logprobs": SCORES}]},
            CALLS,
            {"reasoning_content": "Hm.", "logprobs": SCORES},
        ),
        (
            {"choices": [{"message": message("a")}, {"message": message("b"), "logprobs": SCORES}]},
            ["a", "b"],
            {"choices": [{}, {"logprobs": SCORES}]},
        ),
        (
            {"id": "x", "choices": [{"text": "a", "token_ids": [7]}], "prompt_logprobs": [None], "usage": USAGE},
            "a",
            {"prompt_logprobs": [None], "token_ids": [7], "completion_tokens_details": {"reasoning_tokens": 3}},
        ),
    ],
)
def test_all_that_an_answer_tells_is_in_its_columns(tmp_path, body, answer, details):
    done = RowDone(0, 200, json.dumps(body).encode())
    for suffix in ("jsonl", "csv", "parquet"):
        tabled(tmp_path / f"out.{suffix}", Rows({"q": 1}), [done])
    (line,) = lines(tmp_path / "out.jsonl")
    assert line["answer"] == (json.dumps(answer, separators=(",", ":")) if answer is CALLS else answer)
    assert line["answer_details"] == details
    (record,) = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))
    (row,) = parquet(tmp_path / "out.parquet")
    assert json.loads(record["answer_details"]) == json.loads(row["answer_details"]) == details


def test_long_details_fill_row_groups_as_other_text_does(tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.setattr("cluster.batch.io.output_tables.BATCH_BYTES", 10_000)
    body = json.dumps({"choices": [{"text": "a", "logprobs": {"tokens": ["x" * 6_000]}}]}).encode()
    tabled(tmp_path / "out.parquet", Rows(*[{"q": 1}] * 6), [RowDone(number, 200, body) for number in range(6)])
    assert pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_csv_holds_all_columns_and_json_where_there_is_no_text(tmp_path):
    source = Rows({"a": 'x,"y"\n', "b": {"c": [1, None]}}, {"a": None, "d": True, "e": 1.5}, None, {"a": 7})
    tabled(tmp_path / "out.csv", source, [chat(0, "one\ntwo"), chat(1), wrong(2), wrong(3)])
    text = (tmp_path / "out.csv").read_bytes()
    assert b"\r" not in text
    found = list(csv.DictReader(io.StringIO(text.decode(), newline="")))
    figures = {"finish_reason": "stop", "prompt_tokens": "5", "output_tokens": "2", "answer_details": ""}
    assert found == [
        {"a": 'x,"y"\n', "b": '{"c":[1,null]}', "d": "", "e": "", "answer": "one\ntwo", **figures},
        {"a": "", "b": "", "d": "true", "e": "1.5", "answer": "hi", **figures},
    ]
    assert len(lines(tmp_path / "out.csv.errors.jsonl")) == 2


@given(st.lists(st.text(st.sampled_from('\r\n", x')), min_size=1, max_size=4))
def test_every_reader_finds_as_many_csv_records_as_there_are_rows(tmp_path_factory, texts):
    out = tmp_path_factory.mktemp("c") / "out.csv"
    results = [chat(number, text[::-1]) for number, text in enumerate(texts)]
    tabled(out, Rows(*({"q": text} for text in texts)), results)
    found = list(csv.DictReader(io.StringIO(out.read_bytes().decode(), newline=""), strict=True))
    assert [(one["q"], one["answer"]) for one in found] == [(text, text[::-1]) for text in texts]
    again = [row.fields for row in open_source([str(out)], out.parent).rows()]
    assert again == found


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON), min_size=1, max_size=8), st.integers(1, 4))
def test_parquet_takes_whatever_json_rows_hold(tmp_path_factory, rows, batch):
    out = tmp_path_factory.mktemp("p") / "out.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.batch.io.output_tables.BATCH_ROWS", batch)
        patch.setattr("cluster.batch.io.output_tables.BATCH_ROWS", batch)
        tabled(out, Rows(*rows), [chat(number) for number in range(len(rows))])
    found = parquet(out)
    assert len(found) == len(rows)
    for row, columns in zip(found, rows, strict=True):
        for name in {name for one in rows for name in one}:
            assert same(row[name], columns.get(name)), (name, row[name], columns.get(name))


def same(found, value):
    """Whether a value of a Parquet file is that of the input: itself, with nulls for others' fields, or its JSON."""
    if isinstance(found, dict) and isinstance(value, dict):
        return all(same(found[name], value.get(name)) for name in found) and value.keys() <= found.keys()
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(found, str) and not isinstance(value, str):
        return json.loads(found) == value
    return found == value


def parquet(path):
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def test_parquet_keeps_types_that_all_rows_agree_on(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet

    monkeypatch.setattr("cluster.batch.io.output_tables.BATCH_ROWS", 2)
    monkeypatch.setattr("cluster.batch.io.output_tables.BATCH_ROWS", 2)
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    rows = [
        {
            "n": None,
            "f": 1,
            "mixed": 1,
            "none": None,
            "empty": {},
            "nested": {"a": 1},
            "when": when,
            "exact": 2**60 + 1,
        },
        {"n": None, "f": 2, "mixed": 2, "none": None, "empty": {}, "nested": {"a": 2}, "when": when, "exact": 1},
        {"n": 3, "f": 2.5, "mixed": "x", "none": None, "empty": {}, "nested": {"b": [1]}, "when": None, "exact": 0.5},
    ]
    tabled(tmp_path / "out.parquet", Rows(*rows), [chat(number) for number in range(3)])
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    types = {field.name: field.type for field in table.schema}
    assert types["n"] == pa.int64() and types["f"] == pa.float64() and types["when"] == pa.timestamp("us", tz="UTC")
    texts = ("mixed", "none", "empty", "exact", "answer", "finish_reason", "answer_details")
    assert {types[name] for name in texts} == {pa.string()}
    found = table.to_pylist()
    assert [one["mixed"] for one in found] == ["1", "2", "x"]
    assert [one["exact"] for one in found] == [str(2**60 + 1), "1", "0.5"]
    assert found[2]["nested"] == {"a": None, "b": [1]} and found[0]["when"] == when
    assert (
        found[0]["output_tokens"] == 2 and pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 2
    )


def test_parquet_holds_mappings_with_keys_of_their_own_as_json(tmp_path):
    rows = [{"bias": {str(key): 1 for key in range(start, start + 30)}} for start in range(0, 900, 30)]
    tabled(tmp_path / "out.parquet", Rows(*rows), [chat(number) for number in range(len(rows))])
    assert json.loads(parquet(tmp_path / "out.parquet")[3]["bias"]) == rows[3]["bias"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_outputs_are_compressed_by_their_name(tmp_path, suffix, kind):
    source, results = Rows(*({"q": number} for number in range(500))), [chat(number) for number in range(500)]
    tabled(tmp_path / f"out.{kind}", source, results)
    tabled(tmp_path / f"out.{kind}{suffix}", source, results)
    packed = (tmp_path / f"out.{kind}{suffix}").read_bytes()
    unpack = gzip.decompress if suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj().decompress
    assert unpack(packed) == (tmp_path / f"out.{kind}").read_bytes()
    if suffix == ".gz":
        assert packed[3] == 0 and packed[4:8] == bytes(4)  # no name and no time within


# --- What goes together


@pytest.mark.parametrize(
    ("target", "style", "column", "flag", "said"),
    [
        ("out.txt", Style.COLUMNS, "answer", "output", ".parquet"),
        ("out", Style.OPENAI, "answer", "output", "must end in"),
        ("out.parquet.gz", Style.COLUMNS, "answer", "output", "end it in .parquet"),
        ("out.csv", Style.OPENAI, "answer", "output", "ask for columns"),
        ("out.csv", Style.COLUMNS, "prompt_tokens", "answer_column", "none of"),
        ("out.csv", Style.COLUMNS, "", "answer_column", "must be a name"),
    ],
)
def test_outputs_that_cannot_be_are_refused(target, style, column, flag, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        OutputSpec(target, style, column)
    assert caught.value.flag == flag


def test_the_style_follows_from_input_and_output():
    assert default_style(RowKind.OPENAI, "out.JSONL.gz") is Style.OPENAI
    assert default_style(RowKind.OPENAI, "s3://b/out.parquet") is Style.COLUMNS
    assert default_style(RowKind.PLAIN, "out.jsonl") is Style.COLUMNS
    assert OutputSpec("out.csv", Style.COLUMNS, "reply").added_columns[0] == "reply"
    assert OutputSpec("out.jsonl", Style.OPENAI).added_columns == ()
