"""Checkpoints with quantised weights, written in the layouts that compressed-tensors and vLLM publish."""

from __future__ import annotations

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from engine.quantization.select import METHODS

PROJECTIONS = (
    "input_linear",
    "output_linear",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
)
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def scheme(kind="float", layout="float-quantized", strategy="channel", activations=DYNAMIC, **more):
    """A quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": None, "actorder": None, "block_structure": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **more,
    }


FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
SCHEMES = {
    "float channel": scheme(),
    "float tensor static": scheme(strategy="tensor", activations=STATIC, layout="naive-quantized"),
    "int": scheme("int", "int-quantized", activations=None),
    "int packed": scheme("int", "pack-quantized", activations=None),
    "fp8": FP8_TENSOR,
}


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def pack(values):
    """Four int8, counted from -128, in an int32, the first in the lowest bits."""
    counted = (values.to(torch.int64) + 128).unflatten(1, (-1, 4))
    words = sum(counted[..., i] << 8 * i for i in range(4))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def compress(plain, folder, found, skip=()):
    """Write the checkpoint in `plain` quantised as the scheme says; returns tensor name -> what it stands for."""
    shutil.copytree(plain, folder)
    fp8 = found.get("quant_method") == "fp8" or found["format"] in ("float-quantized", "naive-quantized")
    form = METHODS["fp8" if fp8 else "int8"]
    per_tensor = '"strategy": "channel"' not in json.dumps(found)
    tensors, meaning = load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if name.split(".")[-2] in PROJECTIONS and name.endswith(".weight")]:
        if name.removesuffix(".weight") in skip:
            continue
        weight = tensors.pop(name).float()
        largest = weight.abs().amax(dim=1)
        scale = form.scale_of(largest.max().expand_as(largest) if per_tensor else largest)
        stored = form.quantised(weight, scale)
        meaning[name] = stored.float() * scale[:, None]
        if found.get("format") == "pack-quantized":
            tensors[name + "_packed"] = pack(stored)
            tensors[name.replace(".weight", ".weight_shape")] = torch.tensor(weight.shape)
        else:
            tensors[name] = stored
        tensors[name + "_scale"] = scale[0].clone() if per_tensor else scale[:, None].clone()
        if per_tensor:  # these are the ones with static activations
            tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=found)
    return meaning
