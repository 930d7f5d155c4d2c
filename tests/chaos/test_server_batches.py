"""`/v1/files` and `/v1/batches` on a real app, driven by OpenAI's client, while what runs them is killed."""

from __future__ import annotations

import json

import openai
import pytest

from tests.chaos.batch import rows, write_rows
from tests.e2e.harness import APP, App, eventually, kill, processes

END_SECONDS = 120.0


@pytest.fixture(scope="module")
def client(demo_app: App):
    return openai.OpenAI(base_url=f"{demo_app.url}/v1", api_key="none", max_retries=8)


def requests(count, tokens=60):
    """Rows of one endpoint, as OpenAI wants them, with seeds so that two batches answer alike."""
    asked = [one for one in rows(2 * count, tokens) if one["url"] == "/v1/completions"][:count]
    for number, one in enumerate(asked):
        one["body"]["seed"] = number
    return asked


def started(client, path, endpoint="/v1/completions"):
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h")


def ended(client, batch):
    eventually(
        lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"),
        "the batch ends",
        END_SECONDS,
    )
    return client.batches.retrieve(batch.id)


def until_done(client, batch, rows):
    """Wait until so many rows are done, and return the batch as it was then."""

    def seen():
        found = client.batches.retrieve(batch.id)
        return found if found.request_counts.completed >= rows else None

    return eventually(seen, f"{rows} rows are done", END_SECONDS)


def answers(client, file_id):
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}


@pytest.mark.timeout(300)
def test_a_batch_outlives_its_runner_a_router_and_a_replica(demo_app, client, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", requests(160, 120))
    quiet = ended(client, started(client, path))
    assert quiet.status == "completed"
    undisturbed = answers(client, quiet.output_file_id)
    assert len(undisturbed) == quiet.request_counts.completed == 160 - quiet.request_counts.failed

    batch = started(client, path)
    for title, done in [("Batches", 10), ("Replica", 60), ("Router", 100)]:
        assert until_done(client, batch, done).status == "in_progress"
        kill(processes(f"ray::ServeReplica:{APP}:{title}")[0])
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert answers(client, batch.output_file_id) == undisturbed
    errors = [json.loads(line)["custom_id"] for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert len(errors) == len(set(errors)) == batch.request_counts.failed > 0
    demo_app.wait_whole()


@pytest.mark.timeout(120)
def test_a_batch_is_cancelled_and_listed_and_its_files_deleted(client, tmp_path):
    batch = started(client, write_rows(tmp_path / "rows.jsonl", requests(300, 200)))
    with pytest.raises(openai.ConflictError, match="used by batch"):
        client.with_options(max_retries=0).files.delete(batch.input_file_id)
    eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it runs", 30)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 300
    assert batch.id in [one.id for one in client.batches.list(limit=2)]
    assert client.files.delete(batch.input_file_id).deleted
