import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from engine.errors import CheckpointError
from engine.loader.checkpoint import open_model
from engine.loader.weights import load_model
from engine.quantization.mxfp4 import dequantise_mxfp4
from parallel.group import SoloGroup
from tests.parity.tiny_models import make

EXPERTS, HIDDEN, INNER = 6, 64, 96


def random_blocks(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(dtype):
    blocks, scales = random_blocks(10, 64)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(dequantise_mxfp4(blocks, scales, dtype), expected.transpose(1, 2))


def test_all_sixteen_numbers_are_those_of_the_specification():
    blocks = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    found = dequantise_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    half = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert found.tolist() == [*half, *(-each for each in half)] * 2


@pytest.fixture
def checkpoints(tmp_path):
    """Return two folders with the same weights, one with plain experts, one with MXFP4."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        make("gpt_oss", folder)
    tensors = {folder: load_file(folder / "model.safetensors") for folder in (plain, packed)}
    for name in [name for name in tensors[packed] if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = random_blocks(2 * INNER, HIDDEN) if "gate_up" in name else random_blocks(HIDDEN, INNER)
        tensors[plain][name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del tensors[packed][name]
        tensors[packed] |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for folder, found in tensors.items():
        save_file(found, folder / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


def loaded(folder):
    opened = open_model(str(folder))
    model = load_model(opened, 64, SoloGroup(), torch.float32)
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_a_checkpoint_in_mxfp4_is_the_plain_one_that_it_stands_for(checkpoints):
    plain, packed = map(loaded, checkpoints)
    assert plain.keys() == packed.keys()
    assert all(torch.equal(plain[name], packed[name]) for name in plain)


def test_that_experts_are_made_plain_is_told(checkpoints, caplog):
    with caplog.at_level(logging.INFO):
        loaded(checkpoints[1])
    assert "made plain as they are loaded: 6 tensors in MXFP4" in caplog.text


def test_scales_that_are_missing_are_named(checkpoints):
    _, packed = checkpoints
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        loaded(packed)
