"""The model's fingerprint: equal on every copy, different after anything that changes a token."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import ClusterConfig
from engine import LLM
from engine.errors import CheckpointError
from engine.loader.fingerprint import (
    COMPUTING,
    DRAWING,
    ROOT,
    but_for_rounding,
    model_fingerprint,
    model_identity,
    prompt_fingerprint,
    replica_fingerprint,
    sources_digest,
    vocabulary_fingerprint,
    weights_fingerprint,
    weights_of,
)
from engine.worker.invariance import _device


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two weight files and an index, as a sharded checkpoint has them."""
    path = tmp_path / "model"
    path.mkdir()
    weights = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    save_file({"a": weights, "b": weights[0].clone()}, path / "model-1.safetensors")
    save_file({"c": -weights}, path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    write(path / "model.safetensors.index.json", index)
    write(path / "config.json", {"hidden_size": 8, "rope_theta": 1e4, "transformers_version": "5.0"})
    write(path / "generation_config.json", {"eos_token_id": [1], "temperature": 0.6})
    return path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def retrain(tensor: str, file: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / file)
        tensors[tensor] = tensors[tensor] + 1e-3
        save_file(tensors, path / file)

    return change


def test_copies_of_a_checkpoint_are_one_model_wherever_and_whenever_they_were_made(folder: Path) -> None:
    copy = folder.parent / "elsewhere"
    shutil.copytree(folder, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    write(copy / "config.json", {"rope_theta": 1e4, "hidden_size": 8, "transformers_version": "5.9"})
    write(copy / "generation_config.json", {"eos_token_id": [1], "temperature": 1.0})
    assert model_fingerprint(str(copy), "float32") == model_fingerprint(str(folder), "float32")


@pytest.mark.parametrize(
    "change",
    [
        retrain("a", "model-1.safetensors"),
        retrain("b", "model-1.safetensors"),
        retrain("c", "model-2.safetensors"),
        lambda path: write(path / "config.json", {"hidden_size": 8, "rope_theta": 5e5}),
        lambda path: write(path / "generation_config.json", {"eos_token_id": [1, 2]}),
    ],
    ids=["large-tensor", "small-tensor", "second-file", "config", "end-of-sequence"],
)
def test_anything_that_changes_a_token_makes_another_model(folder: Path, change: Callable[[Path], None]) -> None:
    before = model_fingerprint(str(folder), "float32")
    change(folder)
    assert model_fingerprint(str(folder), "float32") != before


def test_another_dtype_is_another_model(folder: Path) -> None:
    assert model_fingerprint(str(folder), "float32") != model_fingerprint(str(folder), "bfloat16")


def test_other_weights_at_load_are_another_model(folder: Path) -> None:
    """A stream goes on only where the fingerprint is the same: int8 draws other tokens than plain weights."""
    plain = model_fingerprint(str(folder), "float32")
    found = {plain, *(model_fingerprint(str(folder), "float32", each) for each in ("int8", "fp8"))}
    assert len(found) == 3
    assert model_fingerprint(str(folder), "float32", None) == plain


def test_what_the_config_is_to_say_instead_makes_another_model(folder: Path) -> None:
    plain = model_fingerprint(str(folder), "float32")
    assert model_fingerprint(str(folder), "float32", None, '{"rope_theta": 5e5}') != plain
    assert model_fingerprint(str(folder), "float32", None, "{}") == plain
    assert model_identity(str(folder), "float32", None, '{"rope_theta": 5e5}') != plain


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (4).to_bytes(8, "little") + b"{}"], ids=["empty", "huge", "cut"]
)
def test_damaged_weights_are_refused_by_name(folder: Path, content: bytes) -> None:
    (folder / "model-2.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: truncated or damaged"):
        model_fingerprint(str(folder), "float32")


@pytest.mark.parametrize("extra", [0, 3])
def test_weights_without_a_tensor_are_read_as_such_and_what_follows_them_is_damage(folder: Path, extra: int) -> None:
    header = b'{"__metadata__": {}}'
    (folder / "model-2.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x" * extra)
    if not extra:
        assert model_fingerprint(str(folder), "float32")
        return
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: .* damaged: 31 bytes, .* tells of 28"):
        model_fingerprint(str(folder), "float32")


def test_missing_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weight file model-2\.safetensors is missing"):
        model_fingerprint(str(folder), "float32")


def test_other_weights_share_a_vocabulary_and_another_tokenizer_does_not(
    folder: Path,
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    before = vocabulary_fingerprint(str(folder))
    retrain("a", "model-1.safetensors")(folder)
    assert vocabulary_fingerprint(str(folder)) == before
    elsewhere = shutil.copytree(folder, folder.parent / "tokenizer")
    assert vocabulary_fingerprint(str(folder), str(elsewhere)) == before
    (elsewhere / "tokenizer.json").write_text("[]")
    assert vocabulary_fingerprint(str(folder), str(elsewhere)) != before
    assert vocabulary_fingerprint(str(folder), "owner/name") != before


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"],
)
def test_whatever_makes_other_prompts_has_another_fingerprint(folder: Path, name: str) -> None:
    written = folder / name
    written.parent.mkdir(exist_ok=True)
    seen = {prompt_fingerprint(str(folder))}
    for content in ("{}", "[]"):
        written.write_text(content)
        seen.add(prompt_fingerprint(str(folder)))
    assert len(seen) == 3
    elsewhere = shutil.copytree(folder, folder.parent / "tokenizer")
    retrain("a", "model-1.safetensors")(folder)
    assert prompt_fingerprint(str(folder)) == prompt_fingerprint(str(folder), str(elsewhere)) in seen
    assert prompt_fingerprint(str(folder), chat_template="{{ messages }}") not in seen
    assert prompt_fingerprint(str(folder), "owner/name") not in seen


def test_a_replica_tells_what_its_weights_are_held_in(folder: Path) -> None:
    told = set()
    settings: list[dict[str, Any]] = [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "quantization_group_size": 128},
        {"quantization": "int4", "quantization_group_size": 64},
        {"quantize_lm_head": True},
        {"quantization": "int8", "quantize_lm_head": True},
    ]
    for each in settings:
        config = ClusterConfig(model=str(folder), **each)
        told.add(weights_fingerprint(folder, config.engine.resolved(dtype="float32", max_model_len=16)))
    forms = (None, "int8", "int4", "int4 by 64", "output head in int8", "int8, output head in int8")
    assert told == {model_fingerprint(str(folder), "float32", form) for form in forms}
    assert len(told) == 6


SIZES = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 16}


def arithmetic(**changes: Any) -> Mapping[str, str]:
    with LLM("deploy/demo_model", **SIZES | changes) as llm:
        return llm.info.arithmetic


def test_replicas_of_one_kind_compute_alike_and_others_tell_by_what_they_differ() -> None:
    first = arithmetic()
    assert arithmetic(max_num_seqs=8, seed=5, enable_prefix_caching=False) == first
    other = arithmetic(attention_backend="reference")
    assert {name for name in first if first[name] != other[name]} >= {"attention", "kernels"}
    assert f"torch {torch.__version__.partition('+')[0]}" in first["libraries"]
    told = {replica_fingerprint("w", one) for one in (first, other)}
    assert len(told) == 2
    assert len({but_for_rounding(one) for one in told}) == len({weights_of(one) for one in told}) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_rounds_otherwise(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert f"{threads} threads" in _device(torch.device("cpu"), ours=True)
    finally:
        torch.set_num_threads(before)


def test_another_version_of_our_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in COMPUTING:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("engine.loader.fingerprint.ROOT", tmp_path)
    seen = []
    for changed in (None, "engine/layers.c", "parallel/linear.py", "engine/sampling/gumbel.py", "engine/README"):
        if changed is not None:
            with (tmp_path / changed).open("a") as file:
                file.write("\n")
        sources_digest.cache_clear()
        seen.append((sources_digest(), sources_digest(DRAWING)))
    sources_digest.cache_clear()
    all_of_it, drawing = zip(*seen, strict=True)
    assert len(set(all_of_it[:4])) == 4
    assert all_of_it[4] == all_of_it[3], "what is no source computes nothing"
    assert drawing[0] == drawing[1] == drawing[2] != drawing[3]


def test_all_that_draws_is_in_the_part_that_tells_of_drawing() -> None:
    """What the samplers import of our own is either told of, or decides no token."""
    carriers = {"sampling.device_outputs", "report", "request", "sampling_params", "device.gpu"}
    carriers |= {"scheduler.schedule", "scheduler.tables"}
    no_part = carriers | {"errors", "models", "kernels.triton_launch", "kernels.compiler"}
    listed = {ROOT / path for path in DRAWING}
    assert all(path.exists() for path in listed)
    for path in [one for one in listed if one.suffix]:
        for name in re.findall(r"^from engine\.([\w.]+) import", path.read_text(), re.MULTILINE):
            module = ROOT / "engine" / Path(*name.split("."))
            known = {module.with_suffix(".py"), *module.parents} & listed or module.is_dir()
            assert known or {name, name.partition(".")[0]} & no_part, f"{path.name} imports {name}"
