"""How quantised checkpoints are loaded: what is counted and told, and what is refused by the name of a tensor."""

from __future__ import annotations

import json
import logging
import shutil
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.loader.checkpoint import open_model
from engine.loader.fingerprint import model_fingerprint
from engine.loader.safetensors_file import TensorOnDisk
from engine.loader.weights import load_model
from engine.resolve import check_model, resolve_for
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stored_formats import FORMATS, config, edit, made
from tests.parity.test_footprint import held_weights

pytestmark = pytest.mark.usefixtures("one_thread")


COUNTED = ("int4", "int4 zeros", "fp8 channel", "deepseek", "gptq v2", "awq", "nvfp4", "mxfp4", "gptq desc_act")
COUNTED += ("gptq 8 bits", "gptq v2 8 bits", "int8 groups", "int8 packed", "int8 packed groups")


@pytest.mark.parametrize("kind", COUNTED)
def test_the_plan_counts_codes_scales_and_zeros_to_the_byte(two_ranks, models, tmp_path, kind):
    made(models, tmp_path, "llama", kind)
    folder = open_model(str(tmp_path / "stored"))
    plain = open_model(str(tmp_path / "plain")).config
    for size in (1, 2) if kind in FORMATS else (1,):
        asked = config(folder.path, tensor_parallel_size=size, dtype="bfloat16", device=None)
        full = resolve_for(asked, folder.config, "cuda")
        planned = footprint_of(full, folder.config)
        held = two_ranks(held_weights, folder, full) if size == 2 else [held_weights(SoloGroup(), folder, full)]
        assert held == [planned.weight_bytes] * size
        as_if_plain = footprint_of(resolve_for(asked, plain, "cuda"), plain)
        assert planned.parameters == as_if_plain.parameters
        assert planned.layer_products == as_if_plain.layer_products
        assert planned.weight_bytes < as_if_plain.weight_bytes


@pytest.mark.parametrize(
    "kind", ["int4 zeros", "gptq desc_act", "awq", "deepseek", "nvfp4", "gptq 8 bits", "int8 packed"]
)
def test_what_is_on_disk_is_in_memory_for_one_product_at_a_time(models, tmp_path, monkeypatch, kind):
    made(models, tmp_path, "llama", kind)
    folder, read, most = open_model(str(tmp_path / "stored")), TensorOnDisk.__getitem__, []
    alive = WeakSet()

    def watched(self, index):
        found = read(self, index)
        alive.add(found)
        most.append(len(alive))
        return found

    monkeypatch.setattr(TensorOnDisk, "__getitem__", watched)
    load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)
    assert len(most) >= 21
    assert max(most) <= 3
    assert not alive


def test_biases_that_a_model_lacks_may_be_there_if_they_are_zeros(models, tmp_path):
    """AutoGPTQ wrote them; others are refused."""
    made(models, tmp_path, "llama", "gptq")
    file, folder = tmp_path / "stored" / "model.safetensors", open_model(str(tmp_path / "stored"))
    tensors = load_file(file)
    for number, bias in enumerate((torch.zeros(96), torch.ones(96))):
        save_file(tensors | {f"model.layers.{number}.mlp.up_proj.bias": bias}, file)
        if not number:
            load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)
            continue
        with pytest.raises(CheckpointError, match=r"not part of .*layers\.1\.mlp\.up_proj\.bias"):
            load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)


def test_what_is_made_plain_is_told_at_the_start(models, tmp_path, caplog):
    """The products of heads of latent attention."""
    made(models, tmp_path, "deepseek_v3", "gptq v2")
    with caplog.at_level(logging.INFO):
        ModelRunner(config(tmp_path / "stored", dtype="float32"), SoloGroup())
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "made plain" in line] == [
        "quantised in the checkpoint, made plain as they are loaded: 3 layers in int4"
    ]


def test_what_is_not_read_is_told_at_the_start(models, tmp_path, caplog):
    made(models, tmp_path, "llama", "modelopt nvfp4")
    folder = tmp_path / "stored"
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        for part in "kv":
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.5)
        tensors[f"model.layers.{layer}.mlp.up_proj.input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level(logging.INFO):
        ModelRunner(config(folder, dtype="float32"), SoloGroup())
    told = [record.getMessage() for record in caplog.records]
    assert not [line for line in told if "made plain" in line]
    (unread,) = [line for line in told if line.startswith("not read")]
    assert "21 input_scale, 3 input_zero_point, 3 k_scale, 3 v_scale" in unread


def test_a_file_beside_config_json_says_how_weights_are_stored(models, tmp_path):
    made(models, tmp_path, "llama", "modelopt nvfp4")
    folder = tmp_path / "stored"
    before = open_model(str(folder)).config.quantization
    edit(folder, quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert open_model(str(folder)).config.quantization == before
    first = model_fingerprint(str(folder), "float32")
    said["quantization"]["exclude_modules"] = []
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert model_fingerprint(str(folder), "float32") != first


def test_a_file_beside_config_json_names_the_layers_of_a_mixture(models, tmp_path):
    made(models, tmp_path, "llama", "modelopt nvfp4")
    folder = tmp_path / "stored"
    edit(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []})
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    said = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    quantization = open_model(str(folder)).config.quantization
    assert quantization.of("model.layers.0.mlp.up_proj").weights == "nvfp4"
    assert quantization.of("model.layers.1.mlp.up_proj") is None


def test_groups_of_inputs_in_another_order_are_for_one_rank(models, tmp_path):
    made(models, tmp_path, "llama", "gptq desc_act")
    (tmp_path / "stored" / "model.safetensors").unlink()
    asked, model = config(tmp_path / "stored", tensor_parallel_size=2), open_model(str(tmp_path / "stored")).config
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2.*desc_act.*tensor_parallel_size=1"):
        check_model(resolve_for(asked, model, "cpu"), model)


def test_experts_in_one_tensor_are_refused_before_any_weight(models, tmp_path):
    folder = tmp_path / "made"
    shutil.copytree(models("gpt_oss")[1], folder)
    edit(folder, quantization_config=FORMATS["awq"][0])
    (folder / "model.safetensors").unlink()
    opened = open_model(str(folder))
    with pytest.raises(CheckpointError, match=r"mlp\.experts.*experts in one tensor, is not supported"):
        load_model(opened, 64, SoloGroup(), torch.float32, opened.config.quantization)


UP, KEY = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"
DAMAGED = {
    "no scales": ("gptq", lambda t: t.pop(f"{UP}.scales"), ["missing", f"{UP}.scales"]),
    "no zeros": ("awq", lambda t: t.pop(f"{UP}.qzeros"), ["missing", f"{UP}.qzeros"]),
    "no global scale": ("nvfp4", lambda t: t.pop(f"{UP}.weight_global_scale"), ["missing", "weight_global_scale"]),
    "no block scales": ("deepseek", lambda t: t.pop(f"{UP}.weight_scale_inv"), ["missing", "weight_scale_inv"]),
    "other groups": ("gptq", {f"{UP}.scales": lambda t: t[:2]}, [f"{UP}.scales", "[2, 96]", "[4, 96]"]),
    "other blocks": (
        "deepseek",
        {f"{UP}.weight_scale_inv": lambda t: t[:1]},
        ["_scale_inv", "[1, 2]", "[4, 2]"],
    ),
    "half the codes": ("int4", {f"{UP}.weight_packed": lambda t: t[:, :4]}, ["weight_packed", "[96, 4]", "[96, 8]"]),
    "plain weights": (
        "deepseek",
        {f"{UP}.weight": lambda t: t.float()},
        ["up_proj.weight", "float32", "float8_e4m3fn"],
    ),
    "other words": ("awq", {f"{UP}.qweight": lambda t: t.short()}, [f"{UP}.qweight", "int16", "int32"]),
    "no number": ("int4", {f"{UP}.weight_scale": lambda t: t / 0}, [f"{UP}.weight_scale", "no finite number"]),
    "other shape": ("int4", {f"{UP}.weight_shape": lambda t: t + 1}, [f"{UP}.weight_shape", "[97, 65]", "[96, 64]"]),
    "zeros unasked": ("int4", lambda t: t.update({f"{UP}.weight_zero_point": torch.ones(1)}), ["weight_zero_point"]),
    "order unasked": ("gptq", {f"{UP}.g_idx": lambda t: t.flip(0)}, [f"{UP}.g_idx", "desc_act"]),
    "uneven groups": ("gptq desc_act", {f"{UP}.g_idx": lambda t: t * 0}, [f"{UP}.g_idx", "16 inputs", "4 groups"]),
    "unlike orders": ("gptq desc_act", {f"{KEY}.g_idx": lambda t: t.flip(0)}, ["g_idx", "query, key and value"]),
    "no exponents": ("mxfp4", lambda t: t.pop(f"{UP}.weight_scale"), ["missing", f"{UP}.weight_scale"]),
    "no number at all": (
        "mxfp4",
        {f"{UP}.weight_scale": lambda t: t * 0 + 255},
        ["weight_scale", "no finite number"],
    ),
    "no scale at all": ("modelopt nvfp4", {f"{UP}.weight_scale_2": lambda t: t * 0}, ["weight_scale_2", "positive"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_the_name_of_a_tensor(models, tmp_path, case):
    kind, change, words = DAMAGED[case]
    made(models, tmp_path, "llama", kind)
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    if callable(change):
        change(tensors)
    else:
        tensors |= {name: each(tensors[name]).contiguous() for name, each in change.items()}
    save_file(tensors, file)
    folder = open_model(str(tmp_path / "stored"))
    with pytest.raises(CheckpointError) as error:
        load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)
    for word in words:
        assert word in str(error.value)
