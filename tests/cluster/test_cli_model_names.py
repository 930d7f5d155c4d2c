"""Names that stand for models: registered ones, folders, hub ids."""

from importlib.metadata import EntryPoint

import pytest

from cluster import model_names
from cluster.model_names import known_models, resolve_model
from engine.errors import ConfigError


def here() -> str:
    return model_names.__file__.rsplit("/", 1)[0]


def broken() -> str:
    raise FileNotFoundError("weights are not installed")


@pytest.fixture
def registered(monkeypatch):
    entries = [
        EntryPoint("mine", "tests.cluster.test_cli_model_names:here", model_names.GROUP),
        EntryPoint("broken", "tests.cluster.test_cli_model_names:broken", model_names.GROUP),
        EntryPoint("gone", "tests.unit.no_such_module:here", model_names.GROUP),
    ]
    monkeypatch.setattr(model_names, "entry_points", lambda group: [e for e in entries if e.group == group])


def test_a_registered_name_gives_its_folder_even_beside_a_folder_of_that_name(registered, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == here()
    assert resolve_model("./mine") == str(tmp_path / "mine")
    assert known_models() == ("broken", "gone", "mine")


@pytest.mark.parametrize(("name", "words"), [("broken", "not installed"), ("gone", "no_such_module")])
def test_a_registered_name_that_cannot_be_had_says_why(registered, name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_model(name)
    assert caught.value.flag == "model"


def test_a_folder_becomes_absolute_so_that_other_processes_find_it(registered, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("folder") == str(tmp_path / "folder")


def test_a_path_that_is_no_folder_is_refused_with_the_names_that_work(registered):
    with pytest.raises(ConfigError, match=r"no folder ./nowhere.*'mine'"):
        resolve_model("./nowhere")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_anything_else_is_left_as_a_hub_id(registered, name):
    assert resolve_model(name) == name
