"""`squadron batch` as people run it, killed in every way that a laptop knows: the output is that of a quiet run."""

import json
import signal
from collections import Counter

import pytest

from deploy.demo import demo_model_path
from tests.bench.batch_kills import Besieger, drawn_kinds
from tests.chaos.batch import FULL, RANK, REPLICA, TORN, BatchProcess, rows, until, write_rows
from tests.e2e.harness import gone
from tests.long import long
from tests.parity.stored_formats import FORMATS, store

# A disk that is full at the start costs no driver beside it, and a torn write is that of a driver that is killed.
FEW_STARTS = (FULL, REPLICA, RANK, TORN)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [FEW_STARTS, long(drawn_kinds(5, seed=3))], ids=["few starts", "every kind"])
def test_a_batch_survives_its_driver_its_replicas_a_torn_write_and_a_full_disk(tmp_path, kinds):
    report = Besieger(tmp_path, 150, 60, kinds, seed=3).run()
    assert report.problems == []
    assert Counter(report.kills) == Counter(kinds)
    lines = [json.loads(line) for line in (tmp_path / "killed.jsonl").read_text().splitlines()]
    errors = [json.loads(line) for line in (tmp_path / "killed.jsonl.errors.jsonl").read_text().splitlines()]
    asked = [row["custom_id"] for row in rows(150, 60, 3)]
    bad = [name for i, name in enumerate(asked) if i % 50 == 17]
    assert [line["custom_id"] for line in errors] == bad
    assert [line["custom_id"] for line in lines] == [name for name in asked if name not in bad]
    assert not report.left
    assert report.quiet[0] >= report.tokens  # more only where a stop string ended what was drawn on
    assert report.killed[0] >= report.tokens


@pytest.mark.timeout(420)
def test_a_second_driver_is_refused_and_ctrl_c_keeps_what_was_done_and_leaves_no_process(tmp_path):
    output = tmp_path / "out.jsonl"
    source = write_rows(tmp_path / "rows.jsonl", rows(400, 200))
    arguments = (str(source), str(output), "--model", "demo", "-tp", "2", "--cpus-per-worker", "0.5")
    first = BatchProcess(*arguments, home=tmp_path)
    try:
        ledger = tmp_path / "out.jsonl.ledger"
        assert until(lambda: any(path.stat().st_size for path in ledger.glob("rows-*.log")), 240), first.text
        second = BatchProcess(*arguments, "--resume", home=tmp_path)
        assert second.wait() == 1
        assert f"another driver (process {first.process.pid}" in second.text
        started = first.descendants()
        assert started
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 130
        assert "--resume goes on from here" in first.text
        assert until(lambda: all(gone(one.pid) for one in started), 5), [one for one in started if not gone(one.pid)]
    finally:
        first.kill()
    refused = BatchProcess(*arguments, home=tmp_path)
    assert refused.wait() == 1
    assert "go on with --resume, or delete it to begin anew" in refused.text
    assert not output.exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["made", *(long(kind) for kind in FORMATS)])
def test_a_batch_of_quantised_weights_goes_on_where_its_driver_died(tmp_path, kind):
    model, flags = "demo", ["--quantization", "int4", "--quantization-group-size", "32", "--quantize-lm-head"]
    if kind != "made":
        store(demo_model_path(), tmp_path, *FORMATS[kind])
        model, flags = str(tmp_path / "stored"), ["--served-model-name", "demo"]
    good = [row for row in rows(150, 60) if row["body"]["max_tokens"] > 0]
    source = write_rows(tmp_path / "rows.jsonl", good)

    def begun(output, *more):
        settings = ["--model", model, "--dtype", "float32", "--cpus-per-worker", "0.5", *more]
        return BatchProcess(str(source), str(output), *settings, home=tmp_path)

    quiet, killed = tmp_path / "quiet.jsonl", tmp_path / "killed.jsonl"
    undisturbed = begun(quiet, *flags)
    assert undisturbed.wait() == 0, undisturbed.text
    first = begun(killed, *flags)
    try:
        logs = (tmp_path / "killed.jsonl.ledger").glob
        assert until(lambda: any(path.stat().st_size for path in logs("rows-*.log")), 240), first.text
        assert first.running
    finally:
        first.kill()
    assert not killed.exists()
    if kind == "made":
        other = begun(killed, "--resume")
        assert other.wait() == 1
        assert "is of another job" in other.text, other.text
    again = begun(killed, *flags, "--resume")
    assert again.wait() == 0, again.text
    assert killed.read_bytes() == quiet.read_bytes()
