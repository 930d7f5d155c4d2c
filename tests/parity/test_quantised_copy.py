"""Checkpoints that `squadron quantize` writes: they say what the model says that was quantised as it was loaded."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.loader import quantised_copy
from engine.loader.checkpoint import open_model
from engine.loader.quantised_copy import write_quantised
from engine.loader.weights import load_model
from engine.quantization.select import made_at_load
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from parallel.linear import ParallelLinear
from tests.parity.compressed import SCHEMES, compress
from tests.parity.stepping import Stepper
from tests.parity.test_text_half import saved
from tests.parity.tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = 8
MADE = {"int4": GROUP, "int8": None}


def copied(models, tmp_path, name, method):
    plain = models(name)[1]
    write_quantised(open_model(str(plain)), tmp_path / "copy", method, MADE.get(method))
    return plain, tmp_path / "copy"


def config(folder, **values):
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 4, "device": "cpu", **values})


def asked(method):
    return {"quantization": method} | ({"quantization_group_size": GROUP} if method == "int4" else {})


@pytest.mark.parametrize("method", MADE)
@pytest.mark.parametrize("name", ["llama", "llama3_tied_biased", "qwen3_moe", "deepseek_v3"])
def test_a_copy_says_what_the_model_says_that_is_quantised_as_it_loads(two_ranks, models, tmp_path, name, method):
    plain, copy = copied(models, tmp_path, name, method)
    ragged = prompts(5, seed=4)
    made = Stepper(ModelRunner(config(plain, **asked(method)), SoloGroup())).generate(ragged, 6)
    stored = Stepper(ModelRunner(config(copy), SoloGroup())).generate(ragged, 6)
    assert [s.tokens for s in stored] == [s.tokens for s in made]
    for one, other in zip(made, stored, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    ranks = two_ranks(lambda group: ModelRunner(config(copy), group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    assert [s.tokens for s in gang.generate(ragged, 6)] == [s.tokens for s in made]


@pytest.mark.parametrize("method", ["int4", "int8", "fp8"])
def test_a_model_in_16_bits_has_the_same_weights_stored_and_made(models, tmp_path, method):
    plain = tmp_path / "plain"
    shutil.copytree(models("llama")[1], plain)
    weights = {name: one.bfloat16() for name, one in load_file(plain / "model.safetensors").items()}
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    write_quantised(open_model(str(plain)), tmp_path / "copy", method, MADE.get(method))
    made = load_model(open_model(str(plain)), 64, SoloGroup(), torch.bfloat16, made_at_load(method, MADE.get(method)))
    folder = open_model(str(tmp_path / "copy"))
    stored = load_model(folder, 64, SoloGroup(), torch.bfloat16, folder.config.quantization)
    layers = [path for path, part in made.layers.named_modules() if isinstance(part, ParallelLinear)]
    assert len(layers) == 12
    for path in layers:
        one, other = made.layers.get_submodule(path), stored.layers.get_submodule(path)
        assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8)), path
        assert torch.equal(one.weight_scale, other.weight_scale), path
    scale = load_file(tmp_path / "copy" / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.dtype is torch.bfloat16


def test_a_large_copy_lies_in_several_files_and_an_index(models, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised_copy, "SHARD_BYTES", 30_000)
    plain, copy = copied(models, tmp_path, "llama", "int4")
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in copy.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    held = {name: file for file in files for name in load_file(copy / file)}
    assert index["weight_map"] == held
    total = sum(one.nbytes for file in files for one in load_file(copy / file).values())
    assert index["metadata"]["total_size"] == total
    runner = ModelRunner(config(copy), SoloGroup())
    made = ModelRunner(config(plain, **asked("int4")), SoloGroup())
    ragged = prompts(3, seed=4)
    assert [s.tokens for s in Stepper(runner).generate(ragged, 4)] == [
        s.tokens for s in Stepper(made).generate(ragged, 4)
    ]


def test_what_lies_beside_the_weights_is_copied_and_readable(models, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(models("llama")[1], plain)
    (plain / "tokenizer_config.json").write_text("{}")
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tools.jinja").write_text("x")
    (plain / "LICENSE").write_text("free")
    (plain / "pytorch_model.bin").write_bytes(b"pickled")
    write_quantised(open_model(str(plain)), tmp_path / "deep" / "copy", "int4", GROUP)
    found = {str(path.relative_to(tmp_path / "deep" / "copy")) for path in (tmp_path / "deep" / "copy").rglob("*")}
    assert {"tokenizer_config.json", "additional_chat_templates/tools.jinja", "LICENSE", "config.json"} <= found
    assert "pytorch_model.bin" not in found
    assert (tmp_path / "deep" / "copy" / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_modules_that_stay_plain_are_listed_for_engines_that_quantise_every_linear_layer(models, tmp_path):
    _, copy = copied(models, tmp_path, "qwen3_moe", "int4")
    said = json.loads((copy / "config.json").read_text())["quantization_config"]
    assert "lm_head" in said["ignore"]
    assert "model.layers.0.mlp.gate" in said["ignore"]
    stored = load_file(copy / "model.safetensors")
    plain = {
        name.removesuffix(".weight") for name, one in stored.items() if name.endswith("weight") and one.ndim == 2
    }
    assert plain <= {*said["ignore"]}


def test_of_a_multimodal_checkpoint_the_text_half_is_quantised_under_its_own_names(tmp_path):
    plain = tmp_path / "plain"
    saved("qwen2_5_vl", plain)
    found = write_quantised(open_model(str(plain)), tmp_path / "copy", "int4", GROUP)
    assert any("visual" in name for name in found.plain)
    ragged = prompts(3, seed=4)
    tokens = [
        [s.tokens for s in Stepper(ModelRunner(one, SoloGroup())).generate(ragged, 4)]
        for one in (config(tmp_path / "copy"), config(plain, **asked("int4")))
    ]
    assert tokens[0] == tokens[1]


def refused(model, folder, method="int4", group=GROUP):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        write_quantised(open_model(str(model)), folder, method, group)
    return str(caught.value)


def test_what_the_format_has_no_words_for_is_refused_with_what_works(models, tmp_path):
    assert "Conv1D" in refused(models("gpt2")[1], tmp_path / "copy")
    assert "experts in one tensor" in refused(models("gpt_oss")[1], tmp_path / "copy")
    compress(models("llama")[1], tmp_path / "made", SCHEMES["int"])
    assert "quantised already" in refused(tmp_path / "made", tmp_path / "copy")
    assert "use quantization_group_size=64" in refused(models("llama")[1], tmp_path / "copy", group=128)
    assert not (tmp_path / "copy").exists()


def test_experts_that_lie_together_on_disk_are_refused_with_what_works(models, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(models("qwen3_moe")[1], plain)
    weights = load_file(plain / "model.safetensors")
    down = [name for name in weights if name.startswith("model.layers.0.mlp.experts.") and "down_proj" in name]
    weights["model.layers.0.mlp.experts.down_proj"] = torch.stack([weights.pop(name) for name in sorted(down)])
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    assert "serve it with --quantization" in refused(plain, tmp_path / "copy")


def test_a_link_to_a_folder_is_followed(models, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write_quantised(open_model(str(models("llama")[1])), tmp_path / "link", "int4", GROUP)
    assert (tmp_path / "disk" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_source_whose_sums_are_others_is_not_copied(models, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(models("llama")[1], plain)
    (plain / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert "model.safetensors" in refused(plain, tmp_path / "copy")


def test_a_folder_with_something_in_it_is_left_alone(models, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    assert "is there already" in refused(models("llama")[1], tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fault", ["missing", "shape", "nan", "stopped"])
def test_nothing_is_left_of_a_copy_that_failed(models, tmp_path, fault):
    plain = tmp_path / "plain"
    shutil.copytree(models("llama")[1], plain)
    weights = load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "missing":
        del weights[name]
    if fault == "shape":
        weights[name] = weights[name][:, :8].contiguous()
    if fault == "nan":
        weights[name][3, 3] = float("nan")
    save_file(weights, plain / "model.safetensors", {"format": "pt"})

    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        if fault == "stopped" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if fault == "stopped" else CheckpointError) as caught:
        write_quantised(open_model(str(plain)), tmp_path / "copy", "int4", GROUP, stop)
    assert fault == "stopped" or name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]
