"""`ray job submit -- squadron batch`: a batch in a cluster, killed and submitted again."""

import json
from contextlib import contextmanager

import pytest
from ray.job_submission import JobStatus

from deploy.cli.processes import kill_all
from tests.chaos.batch import BatchProcess, rows, until, write_rows
from tests.e2e.command import Command
from tests.e2e.harness import eventually, free_port

MODEL = ("--model", "demo", "-tp", "2", "--cpus-per-worker", "0.5", "--log-interval", "0.5")


def joined(head):
    """Variables of a command that joins the head's Ray."""
    return {"RAY_ADDRESS": head.address, "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder that jobs are submitted with."""
    work = tmp_path_factory.mktemp("work")
    write_rows(work / "rows.jsonl", rows(150, 60))
    return work


@pytest.fixture(scope="module")
def refused(head, work, tmp_path_factory):
    """A job that writes `quiet.jsonl` beside it, and the second driver that wanted to, which has ended."""
    home = tmp_path_factory.mktemp("quiet")
    arguments = ("rows.jsonl", str(home / "quiet.jsonl"), *MODEL)
    job = head.submit(work, *arguments, "--resume")
    assert until((home / "quiet.jsonl.ledger" / "epoch-00000001").exists, 120)
    source, *others = arguments
    with suspended(head.processes(job)):  # or it might have ended before the second one looks
        second = BatchProcess(str(work / source), *others, "--resume", home=home, **joined(head))
        second.wait()
    return job, second


@contextmanager
def suspended(processes):
    """Have these processes do nothing meanwhile; they keep what they have locked."""
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.fixture(scope="module")
def quiet(head, refused):
    """What a job that no kill befalls makes of the rows."""
    job, second = refused
    output = second.log.parent / "quiet.jsonl"
    assert head.until_ended(job) == JobStatus.SUCCEEDED, head.client.get_job_logs(job)
    logs = head.client.get_job_logs(job)
    assert "rows      150, of which 3 failed: 3 invalid_value" in logs
    assert "tokens/s" in logs
    return output.read_bytes()


def test_two_drivers_on_one_output_never_both_write(refused, quiet):
    _, second = refused
    assert second.process.returncode == 1
    assert "another driver (process " in second.text
    written = [json.loads(line)["custom_id"] for line in quiet.decode().splitlines()]
    assert len(written) == len(set(written)) == 147


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
    try:
        server.wait_for("Ctrl-C stops it")
        flags = ("--log-interval", "0.5", "--app", "squadron")
        batch = BatchProcess(source, str(tmp_path / "beside.jsonl"), *flags, home=tmp_path, **joined(head))
        assert batch.wait() == 0, batch.text
        flags = (*flags, "--model", "x")
        wrong = BatchProcess(source, str(tmp_path / "no.jsonl"), *flags, home=tmp_path, **joined(head))
        assert wrong.wait() == 1
        assert "name one of the models of squadron with --model: demo" in wrong.text
        assert server.ctrl_c() == 0
    finally:
        server.kill()
    assert (tmp_path / "beside.jsonl").read_bytes() == quiet
