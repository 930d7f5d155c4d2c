"""Quantised checkpoints and flags that are refused: by name, with what works, before any weight is read."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.quantization import select as quantization
from engine.quantization.spec import QuantizationSpec
from engine.resolve import check_model, resolve_for
from parallel.group import SoloGroup
from tests.parity.compressed import DYNAMIC, SCHEMES, compress, edit_config, scheme
from tests.parity.tiny_models import make

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint of plain weights."""
    folder = tmp_path_factory.mktemp("llama")
    make("llama", folder)
    return folder


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
REFUSED = {
    "unknown": ({"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "GPTQ and AutoRound in 4 and 8 bits"]),
    "gptq 3": (GPTQ | {"bits": 3}, [".bits = 3 of GPTQ"]),
    "gptq 8 in order": (GPTQ | {"bits": 8, "desc_act": True}, [".desc_act = true of GPTQ in 8 bits"]),
    "gptq 8 asymmetric": (GPTQ | {"bits": 8, "sym": False}, [".sym = false of GPTQ in 8 bits"]),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'"]),
    "gptq modules": (
        GPTQ | {"modules_in_block_to_quantize": [["q"], [1]]},
        ["modules_in_block_to_quantize must list", "self_attn.q_proj"],
    ),
    "gptq plain modules": (GPTQ | {"modules_to_not_convert": ["q"]}, ["modules_to_not_convert of GPTQ"]),
    "gptq mixed": (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 2}}}, [".bits = 2 of GPTQ"]),
    "gptq mixed by default": (GPTQ | {"dynamic": {".*down.*": {"group_size": 100}}}, ["group_size", "100"]),
    "gptq expression": (GPTQ | {"dynamic": {"+:(down": {"bits": 8}}}, ["re:(down", "no regular expression"]),
    "gptq override": (GPTQ | {"dynamic": {".*down.*": 8}}, ["dynamic", "must map"]),
    "gptq format": (GPTQ | {"format": "marlin"}, ["checkpoint_format = 'marlin'"]),
    "gptq formats": (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, ["format", "contradict"]),
    "gptq overrides": (GPTQ | {"dynamic": ["lm_head"]}, ["dynamic", "must map"]),
    "gptq groups": (GPTQ | {"group_size": 100}, ["group_size", "100", "multiple of 8"]),
    "gptq group": (GPTQ | {"group_size": "128"}, ["group_size", "'128'"]),
    "auto-round 2": (AUTO_ROUND | {"bits": 2}, [".bits = 2 of GPTQ"]),
    "auto-round mixed": (AUTO_ROUND | {"extra_config": {".*down.*": {"bits": 2}}}, [".bits = 2 of GPTQ"]),
    "auto-round floats": (AUTO_ROUND | {"data_type": "mx_fp"}, ["data_type = 'mx_fp'"]),
    "auto-round packing": (
        AUTO_ROUND | {"packing_format": "auto_round:fp8"},
        ["packing_format = 'auto_round:fp8'", "auto_round:gptqmodel"],
    ),
    "auto-round list": (AUTO_ROUND | {"extra_config": {"a": 16}}, ["extra_config", "must map"]),
    "awq gemv": (AWQ | {"version": "gemv"}, ["version = 'gemv'"]),
    "awq gemv of GPTQModel": ({"quant_method": "awq", "bits": 4, "format": "gemv"}, ["version = 'gemv'"]),
    "awq 8": (AWQ | {"bits": 8}, [".bits = 8 of AWQ"]),
    "awq symmetric": (AWQ | {"zero_point": False}, ["zero_point = false"]),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size", "[128]", "[128, 128]"]),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt = 'e5m2'"]),
    "modelopt other": (MODELOPT | {"quant_algo": "NVFP4_SVD"}, ["quant_algo = 'NVFP4_SVD'"]),
    "modelopt mixed": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.a.b": {"quant_algo": "W4A8_AWQ"}}},
        ["quantized_layers: model.a.b = 'W4A8_AWQ'"],
    ),
    "modelopt no mixture": (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, ["quantized_layers must map"]),
    "modelopt empty mixture": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"mtp.fc": {"quant_algo": "FP8_PB_WO"}}},
        ["quantized_layers without a layer"],
    ),
    "modelopt groups": (MODELOPT | {"group_size": 32}, ["group_size = 32 of NVFP4"]),
    "int8 groups": (scheme("int", "pack-quantized", strategy="group", activations=None), ["8 bits", "per group"]),
    "int8 blocks": (scheme("int", "int-quantized", strategy="block", activations=None), ["8 bits", "per block"]),
    "marlin": (scheme("int", "marlin-24", activations=None), ["marlin-24"]),
    "fp8 as nvfp4": (scheme("float", "nvfp4-pack-quantized"), ["nvfp4-pack-quantized"]),
    "output activations": (
        scheme(config_groups={"g": {"weights": WEIGHTS, "targets": ["Linear"], "output_activations": DYNAMIC}}),
        ["output_activations"],
    ),
    "embeddings": (scheme(config_groups={"g": {"weights": WEIGHTS, "targets": ["Embedding"]}}), ["Embedding"]),
    "sparse": (scheme(sparsity_config={"format": "sparse-24-bitmask"}), ["sparse"]),
    "sparse list": (scheme(sparsity_config=["2:4"]), ["sparsity_config", "must be an object"]),
    "method list": ({"quant_method": ["fp8"]}, ["quant_method = ['fp8']"]),
    "bits list": (scheme(config_groups={"g": {"weights": WEIGHTS | {"num_bits": [8]}}}), ["weights of [8] bits"]),
    "strategy": (scheme(config_groups={"g": {"weights": WEIGHTS | {"strategy": 1}}}), ["a scale per 1"]),
    "gptq rotated": (GPTQ | {"rotation": "hadamard"}, [".rotation", "transformed"]),
    "auto-round rotated": (AUTO_ROUND | {"rotation_config": {"block_size": 32}}, [".rotation_config", "transformed"]),
    "rotated": (scheme(transform_config={"config_groups": {"u": {}}}), ["transformed"]),
    "empty groups": (scheme(config_groups={"a": {}, "b": {}}), ["no weights are quantised"]),
    "no groups": (scheme(config_groups={}), ["no group of layers"]),
    "ignore": (scheme(ignore="lm_head"), ["ignore", "must list"]),
    "expression": (scheme(ignore=["re:(lm_head"]), ["re:(lm_head", "no regular expression"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name_before_any_weight(plain, tmp_path, case):
    found, words = REFUSED[case]
    shutil.copytree(plain, tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").unlink()
    edit_config(tmp_path / "made", quantization_config=found)
    with pytest.raises(CheckpointError) as error:
        open_model(str(tmp_path / "made"))
    for word in (*words, "quantization_config"):
        assert word in str(error.value)


def config_of(plain, **values):
    return replace(open_model(str(plain)).config, **values)


STORED = QuantizationSpec("compressed-tensors", "fp8")


@pytest.mark.parametrize(
    ("asked", "stored", "device", "words"),
    [
        ("fp8", None, "cpu", ["needs a GPU", "quantization=int8"]),
        ("int8", STORED, "cuda", ["already, by compressed-tensors", "leave the flag out"]),
        ("compressed-tensors", None, "cpu", ["no quantization_config", "fp8, int8 or int4"]),
        ("gptq", None, "cpu", ["quantization=gptq", "no quantization_config", "fp8, int8 or int4"]),
        ("int4", STORED, "cpu", ["already, by compressed-tensors", "leave the flag out"]),
    ],
)
def test_contradictions_are_refused_with_what_works(plain, asked, stored, device, words):
    with pytest.raises(ConfigError) as error:
        resolve_for(EngineConfig("m", quantization=asked), config_of(plain, quantization=stored), device)
    assert error.value.flag == "quantization"
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("method", "size", "words"),
    [
        (None, 64, ["for quantization=int4", "leave it out"]),
        ("int8", 64, ["for quantization=int4"]),
        ("int4", 48, ["power of two"]),
        ("int4", 4, ["at least 8"]),
        ("int4", 64.0, ["a whole number"]),
    ],
)
def test_sizes_of_groups_that_are_none_are_refused(method, size, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig("m", quantization=method, quantization_group_size=size)
    assert error.value.flag == "quantization_group_size"
    for word in words:
        assert word in str(error.value)


def test_a_head_in_eight_bits_is_for_cpus(plain):
    with pytest.raises(ConfigError, match="device=cuda leave it out") as error:
        resolve_for(EngineConfig("m", quantize_lm_head=True), config_of(plain), "cuda")
    assert error.value.flag == "quantize_lm_head"


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [("cpu", None, 2048), ("cpu:0", None, 2048), ("cuda", None, 8192), (None, None, 8192), ("cpu", 512, 512)],
)
def test_a_step_has_fewer_tokens_on_a_cpu_unless_told(device, given, expected):
    assert EngineConfig("m", device=device, max_num_batched_tokens=given).token_budget == expected


@pytest.mark.parametrize(
    ("ranks", "size", "words"),
    [
        (1, 128, "qkv: 64 inputs are no multiple of quantization_group_size=128; use quantization_group_size=64"),
        (2, 32, "down on each of 2 ranks: 48 inputs are no multiple .*; use quantization_group_size=16"),
    ],
)
def test_inputs_that_are_no_multiple_of_a_group_are_refused_with_what_works(plain, ranks, size, words):
    asked = EngineConfig(
        str(plain), quantization="int4", quantization_group_size=size, tensor_parallel_size=ranks, device="cpu"
    )
    model = open_model(str(plain)).config
    with pytest.raises(ConfigError, match=words):
        check_model(resolve_for(asked, model, "cpu"), model)


def test_a_gpu_without_units_for_fp8_is_refused(plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    asked = QuantizationSpec("fp8", "fp8", stored=False)
    with pytest.raises(ConfigError, match=r"8\.9 .*has 8\.0; use quantization=int8"):
        quantization.check_capability(asked, "cuda")
    quantization.check_capability(None, "cuda")


def test_sizes_that_fp8_products_do_not_take_are_refused_before_any_weight(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "made")
    edit_config(tmp_path / "made", intermediate_size=90)
    (tmp_path / "made" / "model.safetensors").unlink()
    folder = open_model(str(tmp_path / "made"))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up .*multiples of 16"):
        load_model(folder, 64, SoloGroup(), torch.float32, QuantizationSpec("fp8", "fp8", stored=False))


def test_half_a_merged_layer_cannot_be_ignored(plain, tmp_path):
    compress(plain, tmp_path / "made", scheme(ignore=["model.layers.0.self_attn.k_proj"]))
    folder = open_model(str(tmp_path / "made"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj.*together"):
        load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale"), ["missing", "up_proj.weight_scale"]),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(7, 1)}),
            ["up_proj.weight_scale", "[7, 1]", "96 rows"],
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(8, 12)}),
            ["up_proj.weight_scale", "[8, 12]", "96 rows"],
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(96, 1, dtype=torch.uint8)}),
            ["up_proj.weight_scale", "uint8", "float32"],
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.full((96, 1), torch.nan)}),
            ["up_proj.weight_scale", "no finite number"],
        ),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight_zero_point": torch.ones(1)}), ["zero_point"]),
    ],
)
def test_a_checkpoint_that_lacks_or_bends_its_scales_is_refused(plain, tmp_path, change, words):
    compress(plain, tmp_path / "made", SCHEMES["int"])
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    folder = open_model(str(tmp_path / "made"))
    with pytest.raises(CheckpointError) as error:
        load_model(folder, 64, SoloGroup(), torch.float32, folder.config.quantization)
    for word in words:
        assert word in str(error.value)
