"""Models are whole before Ray starts in a pod."""

import json
import shutil

import pytest

from deploy.demo import demo_model_path
from deploy.fetch import main
from tests import tiny_tokenizer


def test_a_model_that_is_whole_is_told_with_its_size(capsys):
    assert main(["demo"]) == 0
    size = (demo_model_path() / "model.safetensors").stat().st_size
    assert f"demo: {size:,} bytes of weights" in capsys.readouterr().out


def test_a_file_that_was_cut_short_is_told_by_name(tmp_path, capsys):
    folder = tmp_path / "cut"
    shutil.copytree(demo_model_path(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["demo", str(folder)]) == 1
    said = capsys.readouterr()
    assert "demo: " in said.out
    assert "model.safetensors" in said.err


def test_a_separate_tokenizer_is_fetched_and_read_before_the_models(tmp_path, capsys):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path / "tokenizer")
    assert main(["demo", f"--tokenizer={folder}"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: the tokenizer is there"
    assert second.startswith("demo: ")
    (folder / "tokenizer.json").write_text("{}")
    assert main(["demo", "--tokenizer", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"no usable tokenizer in '{folder}'" in said.err
    assert said.out == ""


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_a_file_lists_what_to_fetch(tmp_path, capsys):
    tokenizer = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path / "tokenizer")
    listed = tmp_path / "gpu.json"
    listed.write_text(json.dumps({"models": ["demo"], "tokenizers": [str(tokenizer)]}))
    assert main(["--list", str(listed)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{tokenizer}: the tokenizer is there"
    assert second.startswith("demo: ")


@pytest.mark.parametrize("text", [None, "models: [demo]", '{"modles": ["demo"]}', '["demo"]', '{"models": [1]}'])
def test_a_list_that_is_none_is_refused_with_one_that_works(tmp_path, capsys, text):
    listed = tmp_path / "gpu.json"
    if text is not None:
        listed.write_text(text)
    assert main(["--list", str(listed)]) == 1
    said = capsys.readouterr().err
    assert f"--list: {listed} " in said
    assert "JSON" in said


def test_nothing_to_fetch_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "MODEL: give at least one, such as demo, or --list FILE" in capsys.readouterr().err
