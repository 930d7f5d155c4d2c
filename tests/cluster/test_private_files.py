"""What is written is its owner's alone, on a machine whose umask lets everybody read."""

import io
import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from cluster.accounts.flight_recorder import FlightRecorder, Wait
from cluster.batch.io.check import _Ids
from cluster.batch.io.source import spooled
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import NewTokens
from cluster.batch.server import batch_store, file_store, lease
from cluster.batch.server.root import DRAFTS, OURS, LocalRoot
from cluster.deployments import batches as worker
from cluster.private_files import close_to_others
from cluster.replica.host import dump_flight
from cluster.telemetry.tracing.provider import FileExporter
from deploy.serve.environment import _ensure_token
from parallel.shared_memory import Segment
from tests.cluster.batch.test_batch_ledger import JOB, done
from tests.openai_app import client_for, served_model
from tests.storage_app import BATCH, FORM, storing_app, two_tenants, upload_form


@pytest.fixture(autouse=True)
def everybody_may_read():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(Path(path).lstat().st_mode)


def open_to_others(folder):
    """All below a folder, itself included, that somebody else may do something with."""
    return {str(path): oct(mode(path)) for path in (folder, *folder.rglob("*")) if mode(path) & 0o077}


async def stored(folder, model):
    """A file and a batch, as clients leave them."""
    key = {"authorization": "Bearer sk-a"}
    async with client_for(storing_app(model, folder, tenancy=two_tenants())) as client:
        file = await client.post("/v1/files", content=upload_form(), headers=FORM | key)
        assert file.status_code == 200, file.text
        made = await client.post("/v1/batches", json=BATCH | {"input_file_id": file.json()["id"]}, headers=key)
        assert made.status_code == 200, made.text
        return file.json()["id"], made.json()["id"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def test_files_and_batches_of_a_server(tmp_path, model):
    folder = tmp_path / "not" / "there"
    file_id, batch_id = await stored(folder, model)
    names = {path.name for path in folder.rglob("*")}
    assert {file_id, batch_id, "content", "meta.json", "batch.json"} <= names
    assert open_to_others(folder) == {}
    assert mode(folder.parent) == 0o755, "what lies around it is not ours to close"


async def test_a_directory_that_is_there_keeps_its_modes_and_what_is_ours_in_it_is_closed(tmp_path, model):
    folder = tmp_path / "batches-of-all"
    old = folder / "files" / "file-of-an-earlier-version"
    old.mkdir(parents=True)
    (old / "content").write_text("a prompt")
    (folder / "somebody-elses").mkdir()
    folder.chmod(0o775)
    await stored(folder, model)
    shared = {str(folder), str(folder / "somebody-elses")}
    within_files = {str(old), str(old / "content")}  # nobody gets there: the folder around them is closed
    assert set(open_to_others(folder)) == shared | within_files
    assert (mode(folder), mode(folder / "files"), mode(folder / "somebody-elses")) == (0o775, 0o700, 0o755)


def test_all_folders_of_a_store_are_known_to_it():
    known = {
        batch_store.FOLDER,
        batch_store.OPEN,
        file_store.FOLDER,
        file_store.DELETING,
        lease.SIGNS,
        worker.LEDGERS,
        DRAFTS,
    }
    assert set(OURS) == known


def test_a_large_file_that_is_being_written(tmp_path):
    root = LocalRoot(tmp_path / "store")
    draft = root.draft()
    draft.write(b"prompts")
    assert open_to_others(tmp_path / "store") == {}
    draft.put("files/file-1/content")
    assert root.create("batches/b/state-0.json", b"{}")
    assert open_to_others(tmp_path / "store") == {}


@pytest.mark.parametrize("there", [False, True])
def test_the_ledger_of_a_batch(tmp_path, there):
    folder = tmp_path / "out.jsonl.ledger"
    if there:
        folder.mkdir()
    with closing(Ledger.open(folder, JOB, resume=False)) as ledger:
        for row in range(JOB.rows - 1):
            ledger.note_done(done(row))
        ledger.note_tokens(NewTokens(JOB.rows - 1, 0, 0, (5, 6)))
        ledger.flush()
        assert len(list(folder.iterdir())) >= 4
        assert open_to_others(folder) == {}
        ledger.note_done(done(JOB.rows - 1))
        ledger.flush()
        results = ledger.results()
        next(results)
        assert any(path.name.startswith("order-") for path in folder.iterdir())
        assert open_to_others(folder) == {}
        results.close()
    assert mode(tmp_path / "out.jsonl.ledger") == 0o700


def test_rows_from_standard_input_and_the_ids_of_a_check(tmp_path):
    folder = tmp_path / "ledger"
    stream = io.BytesIO(b'{"prompt": "x"}\n')
    path = spooled(stream, folder, ".jsonl", begun=False)
    assert path.read_bytes() == stream.getvalue()
    ids = _Ids(folder)
    ids.add("a", 0)
    assert open_to_others(folder) == {}
    ids.close()


def test_the_record_of_a_replica_that_died(tmp_path):
    flight = FlightRecorder(lambda: 10.0)
    flight.note("cmpl-1", Wait.TURN, "of tenant a", tenant="a")
    assert mode(dump_flight(flight, tmp_path, "replica", "a rank died")) == 0o600


def test_spans_in_a_file_unless_somebody_was_let_in(tmp_path):
    new, shared = tmp_path / "new.jsonl", tmp_path / "shared.jsonl"
    shared.touch()
    shared.chmod(0o640)
    for path in (new, shared):
        FileExporter(path).shutdown()
    assert (mode(new), mode(shared)) == (0o600, 0o640)


def test_memory_that_ranks_share():
    with Segment.create(4096) as segment:
        assert mode(segment.path) == 0o600


@pytest.mark.parametrize("made_by_ray", [False, True])
def test_the_token_of_our_own_ray(tmp_path, made_by_ray):
    token = tmp_path / ".ray" / "auth_token"
    if made_by_ray:
        token.parent.mkdir()
        token.write_text("1234")
        assert mode(token) == 0o644
    _ensure_token(token)
    assert mode(token) == 0o600
    assert not made_by_ray or token.read_text() == "1234"


def test_what_cannot_be_closed_is_told(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.setattr(Path, "chmod", refused)
    close_to_others(folder)
    assert f"{folder} is open to other users" in caplog.text
    close_to_others(tmp_path / "none")
    assert len(caplog.records) == 1
