"""What is fetched of a model on the hub: weights by those that compute, and by nobody else."""

from __future__ import annotations

from fnmatch import fnmatchcase

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

from cluster.batch.ledger.records import answer_settings
from cluster.config import ClusterConfig, resolve_config
from cluster.router.models import served_model
from deploy.cli.dry_run import make_plan
from deploy.cli.model_files import read_model_config
from deploy.demo import demo_model_path
from deploy.fetch import main as fetch_command
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.loader.checkpoint import find_checkpoint
from engine.loader.fingerprint import model_fingerprint, model_identity, prompt_fingerprint, vocabulary_fingerprint
from engine.text.tokenizer import load_tokenizer
from engine.worker.executor_start import prepare_model

MODEL = "some/model"
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def fetched(monkeypatch):
    """The patterns that were asked of a hub which has the demo model under every id."""
    asked: list[str] = []

    def snapshot(model, revision, allow_patterns):
        assert model.startswith("some/")
        assert revision in (None, "v2")
        asked.extend(allow_patterns)
        return str(demo_model_path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return asked


def wants(patterns, name):
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def test_a_router_fetches_texts_alone(fetched):
    served_model(ClusterConfig(MODEL, tokenizer=str(demo_model_path())))
    vocabulary_fingerprint(MODEL)
    prompt_fingerprint(MODEL)
    assert not wants(fetched, WEIGHTS)
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"):
        assert wants(fetched, name)


def test_a_plan_fetches_the_config_alone(fetched):
    assert read_model_config(MODEL).architecture
    assert wants(fetched, "config.json")
    assert not any(wants(fetched, name) for name in (WEIGHTS, "tokenizer.json", "model.safetensors.index.json"))


def test_a_batch_knows_its_model_by_its_revision(fetched, monkeypatch, tmp_path):
    known = {
        model_identity(MODEL, "float32"),
        model_identity(MODEL, "bfloat16"),
        model_identity("some/other", "float32"),
    }
    assert not wants(fetched, WEIGHTS)
    assert model_identity(MODEL, "float32") in known, "the same as before"
    newer = tmp_path / "0123abcd"
    newer.mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, revision, allow_patterns: str(newer))
    known.add(model_identity(MODEL, "float32"))
    folder = str(demo_model_path())
    assert model_identity(folder, "float32") == model_fingerprint(folder, "float32")
    assert len(known | {model_identity(folder, "float32")}) == 5


def test_whoever_reads_a_model_reads_the_revision_that_is_set(monkeypatch):
    """`fetched` would take any: here the hub has no other."""
    asked = []

    def snapshot(model, revision, allow_patterns):
        asked.append((model, revision))
        return str(demo_model_path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    config = ClusterConfig(MODEL, revision="v2", tokenizer=str(demo_model_path()))
    served_model(config)
    answer_settings(config)
    for read in (vocabulary_fingerprint, prompt_fingerprint, find_checkpoint, lambda one: model_identity(one, "x")):
        read(config.source)
    prepare_model(EngineConfig(MODEL, revision="v2", device="cpu"))
    make_plan(config)
    assert resolve_config({"model": MODEL, "revision": "v2"}).source == f"{MODEL}@v2"
    assert fetch_command([f"{MODEL}@v2"]) == 0
    assert set(asked) == {(MODEL, "v2")}
    assert len(asked) > 8


def test_a_model_is_the_same_by_whichever_name_its_commit_was_found(fetched):
    assert model_identity(MODEL, "float32") == model_identity(f"{MODEL}@v2", "float32")


def test_a_revision_that_is_not_there_is_told_in_a_sentence(monkeypatch):
    def lost(*args, **kwargs):
        raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://hub/")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", lost)
    with pytest.raises(CheckpointError, match=r"^revision: 'some/model' has no branch, tag or commit 'v3'"):
        find_checkpoint(f"{MODEL}@v3")


@pytest.mark.parametrize("model", ["demo", str(demo_model_path())])
def test_a_folder_has_no_revisions(model):
    with pytest.raises(ConfigError, match=r"revision: .* is a folder, and only models of the hub") as error:
        resolve_config({"model": model, "revision": "v2"})
    assert error.value.flag == "revision"
    with pytest.raises(CheckpointError, match=r"revision: .* is a folder"):
        find_checkpoint(f"{demo_model_path()}@v2")


def test_a_tokenizer_may_have_a_revision_too(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *args, **more: asked.append((args, more))
    )
    with pytest.raises(CheckpointError):
        load_tokenizer("some/words@v2")
    with pytest.raises(CheckpointError):
        load_tokenizer("some/words")
    assert [(args, more.get("revision")) for args, more in asked] == [
        (("some/words",), "v2"),
        (("some/words",), None),
    ]


@pytest.mark.parametrize("whole", [find_checkpoint, lambda model: model_fingerprint(model, "")])
def test_whoever_computes_fetches_all(fetched, whole):
    whole(MODEL)
    assert all(wants(fetched, name) for name in (WEIGHTS, "config.json", "tokenizer.json", "SHA256SUMS"))


def test_a_connection_that_is_lost_is_told_in_a_sentence(monkeypatch, capsys):
    """As the hub's client does after some tries: it lets its HTTP library's error through."""
    (lost, _) = HfHubHTTPError.__bases__

    def breaks(*args, **kwargs):
        raise lost("peer closed connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
    assert fetch_command([MODEL]) == 1
    assert "lost while 'some/model' was fetched (peer closed connection); try again" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_taken_for_one_of_the_hub(monkeypatch):
    def breaks(*args, **kwargs):
        raise TypeError("ours")

    monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
    with pytest.raises(TypeError, match="ours"):
        find_checkpoint(MODEL)


def test_a_plan_of_a_gated_model_says_what_to_do(monkeypatch):
    def gated(*args, **kwargs):
        raise GatedRepoError("gated", response=httpx.Response(403, request=httpx.Request("GET", "http://127.0.0.1/")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(CheckpointError, match="accept its terms"):
        read_model_config("some/gated")
