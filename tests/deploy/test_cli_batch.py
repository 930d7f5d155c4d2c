"""`squadron batch`: what is said before anything is started, and what it makes of its flags."""

import errno
import io
import os
import re
import shutil
import sys

import pytest
from rich.console import Console

from cluster.batch.errors import BatchError
from cluster.batch.row_tasks import ColumnOptions
from cluster.batch.run.driver import BatchProgress
from cluster.batch.run.run_row import failed
from cluster.errors import ApiError
from cluster.model_names import resolve_model
from deploy import main as cli
from deploy.batch import command
from deploy.batch.flags import body_fields
from deploy.batch.progress import ProgressDisplay, summary
from engine.errors import ConfigError
from tests.chaos.batch import rows, write_rows

DEMO = ("--model", "demo")


@pytest.fixture
def squadron(monkeypatch, capsys, tmp_path):
    """Runs `squadron batch` in this process; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["squadron", "batch", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    return run


@pytest.fixture
def good(tmp_path):
    return write_rows(tmp_path / "good.jsonl", rows(60, 10))


@pytest.fixture
def refused(monkeypatch):
    """Nothing can be written to memory://."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", refuse)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("none.jsonl", "out.jsonl", *DEMO), "none.jsonl is not there"),
        (("twice.jsonl", "out.jsonl", *DEMO), "custom_id 'id-0' at twice.jsonl:4 is used at twice.jsonl:1 already"),
        (("good.jsonl", "out.xyz", *DEMO), "must end in one of .jsonl"),
        (("good.jsonl", "good.jsonl", *DEMO), "put the output somewhere else"),
        (("good.jsonl", "twice.jsonl", *DEMO), "twice.jsonl (or its .errors.jsonl) is there already"),
        (("good.jsonl", "twice.jsonl", *DEMO, "--resume"), "twice.jsonl (or its .errors.jsonl) is there already"),
        (("good.jsonl", "out.jsonl"), "model"),
        (("good.jsonl", "out.jsonl", "--model", "no-such-model"), "no-such-model"),
        (("good.jsonl", "out.jsonl", *DEMO, "--max-tokens", 5), "--max-tokens is for rows of columns"),
        (("good.jsonl", "out.jsonl", *DEMO, "--temperature", 0), "--temperature is for rows of columns"),
        (("good.jsonl", "out.jsonl", *DEMO, "--params", '{"max_tokens": 5}'), "--params is for rows of columns"),
        (("good.jsonl", "l/out.jsonl", *DEMO, "--ledger", "l"), "l/out.jsonl lies in l, the folder of the ledger"),
        (("good.jsonl", "out/a.jsonl", *DEMO, "--ledger", "."), "good.jsonl lies in ., the folder of the ledger"),
        (("kept", "out.jsonl", *DEMO, "--ledger", "kept/l"), "kept/l, the folder of the ledger, lies in kept"),
        (("good.jsonl", "memory://out.jsonl", *DEMO, "--ledger", "kept"), "kept holds 'thesis.txt', which is of no"),
        (("good.jsonl", "out.jsonl", *DEMO, "--params", "[1]"), "--params must be a JSON object such as"),
        (("good.jsonl", "out.jsonl", *DEMO, "--format", "xml"), "--format must be openai or plain, not 'xml'"),
        (("good.jsonl", "out.jsonl", *DEMO, "--promt-column", "x"), "Did you mean --prompt-column?"),
        (("good.jsonl", "out.jsonl", *DEMO, "--port", 1), "No such option"),
        (("good.jsonl", *DEMO), "Missing argument 'OUTPUT'"),
        (DEMO, "Missing argument 'INPUT"),
        (("good.jsonl", "out.jsonl", "--app", "squadron"), "set RAY_ADDRESS to the cluster that the app runs in"),
        (("good.jsonl", "out.jsonl", "--app", "squadron", "-tp", 2), "leave out --tensor-parallel-size"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_started(squadron, good, tmp_path, monkeypatch, arguments, told):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_rows(tmp_path / "twice.jsonl", [*rows(3, 10), *rows(1, 10)])
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("ten years of work")
    before = files(tmp_path)
    code, text = squadron(*arguments)
    assert code in (1, 2), text
    assert told in text
    assert "Traceback" not in text
    assert files(tmp_path) == before


def test_a_dry_run_checks_every_row_and_counts(squadron, good):
    code, text = squadron(good, "out.jsonl", *DEMO, "--dry-run")
    assert code == 1
    assert "rows 60, of which 1 would fail" in text
    assert "good.jsonl:18: max_tokens must be between 1 and" in text


def test_a_dry_run_tells_of_an_output_that_cannot_be_written_and_makes_no_folder(squadron, good, tmp_path, refused):
    before = files(tmp_path)
    code, text = squadron(good, "memory://tried/out.jsonl", *DEMO, "--dry-run")
    assert (code, "memory://tried/out.jsonl cannot be written (Permission denied)" in text) == (1, True), text
    assert "rows 60" in squadron(good, "new/folder/out.jsonl", *DEMO, "--dry-run")[1]
    assert files(tmp_path) == before
    assert not (tmp_path / "new").exists()


def piped(monkeypatch, path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))


@pytest.mark.parametrize("why", ["dry", "wrong", "complete"])
def test_standard_input_is_not_kept_where_nothing_begins(squadron, good, tmp_path, monkeypatch, why):
    if why == "wrong":
        write_rows(good, [*rows(3, 10), *rows(1, 10)])
    if why == "complete":
        monkeypatch.setattr(command, "is_finished", lambda *_: True)
    piped(monkeypatch, good)
    before = sorted(tmp_path.iterdir())
    _, text = squadron("-", "out.jsonl", *DEMO, *(["--dry-run"] if why != "complete" else []))
    assert {"dry": "rows 60", "wrong": "is used at", "complete": "is complete already"}[why] in text
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_leaves_what_a_run_has_kept_of_standard_input(squadron, good, tmp_path, monkeypatch):
    (tmp_path / "out.jsonl.ledger").mkdir()
    kept = write_rows(tmp_path / "out.jsonl.ledger" / "stdin.jsonl", rows(4, 10))
    piped(monkeypatch, good)
    squadron("-", "out.jsonl", *DEMO, "--dry-run")
    assert kept.exists()


@pytest.fixture
def stopped(monkeypatch):
    """Batches end before their first row."""

    def stop(*_):
        raise BatchError("stopped here")

    monkeypatch.setattr(command.BatchCommandRun, "_answer", stop)


def test_a_batch_does_not_go_on_with_another_chat_template(squadron, good, tmp_path, stopped):
    copy = shutil.copytree(resolve_model("demo"), tmp_path / "copy")
    asked = (good, "out.jsonl", "--model", copy, "--resume")
    assert "stopped here" in squadron(*asked)[1]
    assert "stopped here" in squadron(*asked)[1]
    (copy / "chat_template.jinja").write_text("Answer: {{ messages[0].content }}")
    code, text = squadron(*asked)
    assert (code, "of another job: the tokenizer or the chat template was changed;" in text) == (1, True), text


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (("--max-tokens", 250), ("--max-tokens", 251), "--max-tokens was 250 and is 251;"),
        ((), ("--max-tokens", 5), "--max-tokens was not set and is 5;"),
        (("--seed", 1), ("--seed", 2), "--seed was 1 and is 2;"),
        ((), ("--chat",), "--chat was false and is true;"),
        (("--format", "plain"), ("--format", "openai"), "--format was 'plain' and is 'openai';"),
        (
            ("--params", '{"max_tokens": 3}'),
            ("--params", '{"max_tokens": 4}'),
            """--params was '{"max_tokens":3}' and is '{"max_tokens":4}';""",
        ),
        (
            ("--template", "x" * 500 + "{{ prompt }} max_tokens"),
            ("--template", "x" * 500 + "{{ row }} max_tokens"),
            "xxx{{ prompt }} max_tokens' and is '...xxx",
        ),
    ],
)
def test_going_on_with_another_setting_is_refused_by_its_flag(squadron, tmp_path, stopped, before, after, told):
    write_rows(tmp_path / "data.jsonl", [{"custom_id": "a", "prompt": "x"}])
    asked = ("data.jsonl", "out.csv", *DEMO, "--resume")
    assert "stopped here" in squadron(*asked, *before)[1]
    code, text = squadron(*asked, *after)
    assert (code, told in text) == (1, True), text
    assert "or delete out.csv.ledger to begin anew" in text and len(text) < 400


def test_going_on_with_another_input_is_refused(squadron, good, tmp_path, stopped):
    assert "stopped here" in squadron(good, "out.jsonl", *DEMO)[1]
    write_rows(good, rows(61, 10))
    code, text = squadron(good, "out.jsonl", *DEMO, "--resume")
    assert (code, "of another job: the input was changed;" in text) == (1, True), text


@pytest.fixture
def failing(monkeypatch):
    """All rows fail, the last ones first."""

    def fail(_, work):
        for row in reversed(range(work.ledger.job.rows)):
            error = ApiError("invalid_value", f"max_tokens is\nwrong in {row}: {'x' * 500}", status=400)
            work.ledger.note_done(failed(row, error))

    monkeypatch.setattr(command.BatchCommandRun, "_answer", fail)


@pytest.mark.parametrize("limit", [(), ("--max-errors", 2)])
def test_the_first_errors_are_told_where_rows_failed(squadron, good, failing, limit):
    code, text = squadron(good, "out.jsonl", *DEMO, *limit)
    assert code == (1 if limit else 0), text
    for row in range(3):
        assert f"failed {good}:{row + 1}: max_tokens is wrong in {row}: xxx" in text
    assert text.count("failed ") == 3 and text.count("xxx...") == 3 and len(text) < 1200
    assert ("more than --max-errors 2; raise it and go on with --resume" in text) == bool(limit)


def test_a_limit_of_errors_holds_where_all_rows_have_failed_already(squadron, good, failing):
    for _ in range(2):
        code, text = squadron(good, "out.jsonl", *DEMO, "--max-errors", 2, "--resume")
        assert (code, "more than --max-errors 2" in text) == (1, True), text
    assert squadron(good, "out.jsonl", *DEMO, "--max-errors", 1000, "--resume")[0] == 0


def test_a_batch_whose_next_row_costs_too_much_is_refused_before_ray_starts(squadron, good, stopped):
    code, text = squadron(good, "out.jsonl", *DEMO, "--max-cost-tokens", 5)
    assert code == 1
    assert "the next row may take" in text
    assert "beyond --max-cost-tokens 5; raise it and go on with --resume" in text
    assert "stopped here" in squadron(good, "out.jsonl", *DEMO, "--max-cost-tokens", 50_000, "--resume")[1]


def test_an_output_that_cannot_be_written_is_told_before_anything_is_kept(squadron, good, tmp_path, refused):
    before = sorted(tmp_path.iterdir())
    code, text = squadron(good, "memory://tried/out.jsonl", *DEMO)
    assert (code, "memory://tried/out.jsonl cannot be written (Permission denied)" in text) == (1, True), text
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_of_columns(squadron, tmp_path):
    (tmp_path / "table.csv").write_text("name,n\ndouble,1\nhalf,2\n")
    flags = ("--template", "def {{ name }}(x, n={{ n }}):", "--max-tokens", 7)
    code, text = squadron("table.csv", "out.csv", *DEMO, *flags, "--dry-run")
    assert code == 0, text
    assert "rows 2, of which 0 would fail" in text
    assert "at most 14 of output" in text


def test_a_dry_run_of_text_takes_lines_as_prompts_of_as_few_tokens_as_openai_answers(squadron, tmp_path):
    (tmp_path / "lines.txt").write_text("def double(x):\n\ndef half(x):\n")
    code, text = squadron("lines.txt", "out.jsonl", *DEMO, "--dry-run")
    assert code == 0, text
    assert "rows 2, of which 0 would fail" in text
    assert "at most 32 of output" in text


def test_fields_of_every_request_come_as_json_or_one_by_one():
    options = ColumnOptions(max_tokens=5, params=body_fields('{"top_p": 0.9, "max_tokens": 3}'))
    assert options.body == {"top_p": 0.9, "max_tokens": 5}
    with pytest.raises(ConfigError, match="params must be a JSON object"):
        body_fields("{top_p: 1}")


def figures(done, drawn, **more):
    given = {"rows": 1000, "errors": 2, "prompt_tokens": 10, "output_tokens": 20, "prefilled": 100, "cached": 25}
    return BatchProgress(
        **given | {"done": done, "drawn": drawn, "running": 3, "replicas": 2, "seconds": 10.0} | more
    )


def test_progress_tells_speed_and_time_left_a_line_an_interval():
    now = [0.0]
    console = Console(record=True, width=200)
    progress = ProgressDisplay(console, 10.0, clock=lambda: now[0])
    for second in range(0, 21, 5):
        now[0] = float(second)
        progress.take(figures(done=second * 10, drawn=second * 100))
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert lines[-1] == (
        "rows 200/1,000 (20.0 %) | errors 2 | tokens/s 100 | cached 25% | running 3 on 2 | ETA 0:01:20"
    )


def test_plain_progress_begins_with_replicas_that_start_and_ends_with_all_rows():
    console = Console(record=True, width=200)
    progress = ProgressDisplay(console, 10.0, clock=lambda: 0.0)
    with progress.shown():
        progress.take(figures(done=0, drawn=0, replicas=0, running=0))
        progress.take(figures(done=990, drawn=5))
        progress.take(figures(done=1000, drawn=5, replicas=0, running=0))
    assert console.export_text().splitlines() == [
        "rows 0/1,000 (0.0 %) | errors 2 | tokens/s 0 | cached 25% | starting replicas | ETA -",
        "rows 1,000/1,000 (100.0 %) | errors 2 | tokens/s 0 | cached 25%",
    ]


def test_the_end_is_told_once():
    console = Console(record=True, width=200)
    progress = ProgressDisplay(console, 10.0, clock=lambda: 0.0)
    with progress.shown():
        progress.take(figures(done=1000, drawn=5))
    assert len(console.export_text().splitlines()) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("replicas", [0, 12])
def test_the_live_line_fits_the_terminal_and_keeps_what_matters(width, replicas):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width, height=20, soft_wrap=True)
    progress = ProgressDisplay(console, 10.0, clock=lambda: 0.0)
    with progress.shown():
        progress.take(figures(done=123_456, drawn=5, rows=1_000_000, errors=1234, running=120, replicas=replicas))
    shown = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", out.getvalue()) if line.strip()]
    assert {line for line in shown if "rows" not in line} == set(), shown
    assert all(len(line) <= width for line in shown), shown
    assert "rows 123,456/1,000,000 (12.3 %)" in shown[-1]
    assert ("starting replicas" in shown[-1]) == (replicas == 0 and width > 40)
    assert ("cached" in shown[-1]) == (width == 140)
    assert ("ETA" in shown[-1]) == (width > 40 or replicas > 0)


def test_a_summary_tells_rows_errors_tokens_and_speed():
    lines = summary(figures(1000, 5000), {"invalid_value": 2}, 14.0, 2)
    assert lines == [
        "rows      1,000, of which 2 failed: 2 invalid_value",
        "tokens    10 of prompts, 20 of output",
        "time      14.0 s, of rows 10.0 s: 500 tokens/s, 250 a replica",
    ]
