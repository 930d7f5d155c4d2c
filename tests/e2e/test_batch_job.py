"""`ray job submit -- squadron batch`: a batch in a cluster, killed and submitted again."""

import json

import pytest
from ray.job_submission import JobStatus

from deploy.cli.processes import kill_all
from tests.chaos.batch import BatchProcess, rows, until, write_rows
from tests.e2e.command import Command
from tests.e2e.harness import eventually, free_port

MODEL = ("--model", "demo", "-tp", "2", "--cpus-per-worker", "0.5", "--log-interval", "0.5")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder that jobs are submitted with."""
    work = tmp_path_factory.mktemp("work")
    write_rows(work / "rows.jsonl", rows(150, 60))
    return work


@pytest.fixture(scope="module")
def quiet(head, work, tmp_path_factory):
    """What a job that nothing befalls makes of the rows."""
    output = tmp_path_factory.mktemp("quiet") / "quiet.jsonl"
    job = head.submit(work, "rows.jsonl", str(output), *MODEL)
    assert head.until_ended(job) == JobStatus.SUCCEEDED, head.client.get_job_logs(job)
    logs = head.client.get_job_logs(job)
    assert "rows      150, of which 3 failed: 3 invalid_value" in logs
    assert "tokens/s" in logs
    return output.read_bytes()


@pytest.mark.timeout(400)
def test_a_job_that_is_killed_goes_on_when_it_is_submitted_again(head, work, quiet, tmp_path):
    killed = tmp_path / "killed.jsonl"
    ledger = tmp_path / "killed.jsonl.ledger"
    first = head.submit(work, "rows.jsonl", str(killed), *MODEL, "--resume")
    assert until(lambda: any(path.stat().st_size > 4000 for path in ledger.glob("rows-*.log")), 120)
    drivers = head.processes(first)
    assert drivers
    kill_all(drivers)
    assert head.until_ended(first) == JobStatus.FAILED
    assert not killed.exists()

    # Another cluster user stops one; what it did counts as well.
    second = head.submit(work, "rows.jsonl", str(killed), *MODEL, "--resume")
    eventually(lambda: "tokens/s" in head.client.get_job_logs(second), "the second driver works", 60)
    head.client.stop_job(second)
    assert head.until_ended(second) == JobStatus.STOPPED
    assert "--resume goes on from here" in head.client.get_job_logs(second)

    third = head.submit(work, "rows.jsonl", str(killed), *MODEL, "--resume")
    assert head.until_ended(third) == JobStatus.SUCCEEDED, head.client.get_job_logs(third)
    assert killed.read_bytes() == quiet
    assert json.loads((tmp_path / "killed.jsonl.manifest.json").read_text())["rows"] == 150
    # Nothing of the batch is left in the cluster.
    eventually(lambda: not head.processes(third), "all drivers have ended", 10)


@pytest.mark.timeout(300)
def test_a_batch_uses_the_replicas_of_a_running_app(head, work, quiet, tmp_path):
    source = str(work / "rows.jsonl")
    sizes = ("--replicas", "2", "-tp", "2", "--cpus-per-worker", "0.5")
    server = Command("serve", "demo", *sizes, "--port", str(free_port()), home=tmp_path, RAY_ADDRESS=head.address)
    joined = {"RAY_ADDRESS": head.address, "RAY_AUTH_MODE": "disabled"}
    try:
        server.wait_for("Ctrl-C stops it")
        flags = ("--log-interval", "0.5", "--app", "squadron")
        batch = BatchProcess(source, str(tmp_path / "beside.jsonl"), *flags, home=tmp_path, **joined)
        assert batch.wait() == 0, batch.text
        wrong = BatchProcess(source, str(tmp_path / "no.jsonl"), *flags, "--model", "x", home=tmp_path, **joined)
        assert wrong.wait() == 1
        assert "name one of the models of squadron with --model: demo" in wrong.text
        assert server.ctrl_c() == 0
    finally:
        server.kill()
    assert (tmp_path / "beside.jsonl").read_bytes() == quiet
