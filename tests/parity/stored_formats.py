"""Makes quantised checkpoints by hand, from the formats' descriptions; nothing of the engine makes them.

Compared once with the formats' own libraries. Bit for bit with what they write: compressed-tensors 0.20.0
(pack-quantized in four bits with and without zero points, float-quantized by channel, tensor and block,
int-quantized), AutoGPTQ 0.7.1 (with and without desc_act) and AutoAWQ 0.2.7.post3. By what compressed-tensors
makes of them: nvfp4-pack-quantized, mxfp4-pack-quantized. modelopt's NVFP4, GPTQ's v2 and eight bits,
pack-quantized in eight by groups, and `weight_g_idx` are from their descriptions alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig

E4M3 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# From a plain weight [out, in] to what is stored by the last part of its name, and what that stands for.
Maker = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def words(rows: np.ndarray, bits: int = 4) -> Tensor:
    """[n, 32 / bits * m] numbers of so many bits -> [n, m] int32, the first number in the lowest bits."""
    many = 32 // bits
    found = np.zeros((rows.shape[0], rows.shape[1] // many), np.uint32)
    for place in range(many):
        found |= rows[:, place::many].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(found.view(np.int32).copy())


def by_groups(weight: Tensor, groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in] of 0 to 15, scales and zeros [out, groups]. groups: the group of each input."""
    count = int(groups.max()) + 1
    codes, scales, zeros = torch.zeros(weight.shape, dtype=torch.long), [], []
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scale, zero = part.abs().amax(1) / 7, torch.full((len(part),), 8.0)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round()
        scale = scale.half()
        codes[:, groups == group] = ((part / scale.float()[:, None]).round() + zero[:, None]).clamp(0, 15).long()
        scales.append(scale)
        zeros.append(zero.long())
    return codes, torch.stack(scales, 1), torch.stack(zeros, 1)


def meaning(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def groups_of(ins: int, group: int, shuffled: bool = False) -> Tensor:
    found = torch.arange(ins) // (group if group > 0 else ins)
    return found[torch.randperm(ins, generator=torch.Generator().manual_seed(ins))] if shuffled else found


def gptq(group: int, *, v2: bool = False, symmetric: bool = False, shuffled: bool = False) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group, shuffled)
        codes, scales, zeros = by_groups(weight, groups, symmetric)
        stored = {
            "qweight": words(codes.numpy()).t().contiguous(),
            "qzeros": words((zeros.t() if v2 else (zeros.t() - 1) & 15).numpy()),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        return stored, meaning(codes, scales, zeros, groups)

    return make


def eight_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in] of 0 to 255, counted from 128, scales [out, groups] and what they stand for.

    Some scales are below 0, as AutoRound writes them; the last group may have fewer inputs.
    """
    groups = groups_of(weight.shape[1], group)
    parts = [weight[:, groups == each] for each in range(int(groups.max()) + 1)]
    scale = (torch.stack([part.abs().amax(1) for part in parts], 1) / 127).half()
    scale[::3] *= -1
    each = scale.float()[:, groups]
    codes = ((weight / each).round() + 128).clamp(0, 255)
    return codes.long(), scale, (codes - 128) * each


def gptq8(group: int, *, v2: bool = False) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, meant = eight_bits(weight, group)
        zeros = np.full((scales.shape[1], len(weight)), 128 if v2 else 127)
        stored = {
            "qweight": words(codes.numpy(), 8).t().contiguous(),
            "qzeros": words(zeros, 8),
            "scales": scales.t().contiguous(),
            "g_idx": groups_of(weight.shape[1], group).int(),
        }
        return stored, meant

    return make


def pack_quantized8(group: int) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, meant = eight_bits(weight, group)
        stored = {
            "weight_packed": words(codes.numpy(), 8),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return stored, meant

    return make


def int8_groups(group: int) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, meant = eight_bits(weight, group)
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, meant

    return make


def awq(group: int) -> Maker:
    def ordered(rows: Tensor) -> Tensor:
        return words(rows.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1).numpy())

    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group)
        codes, scales, zeros = by_groups(weight, groups, False)
        stored = {
            "qweight": ordered(codes.t()),
            "qzeros": ordered(zeros.t()),
            "scales": scales.t().contiguous(),
        }
        return stored, meaning(codes, scales, zeros, groups)

    return make


def pack_quantized(group: int, *, symmetric: bool = True, shuffled: bool = False) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group, shuffled)
        codes, scales, zeros = by_groups(weight, groups, symmetric)
        stored = {
            "weight_packed": words(codes.numpy()),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros.t().numpy()).t().contiguous()
        if shuffled:
            stored["weight_g_idx"] = groups.int()
        return stored, meaning(codes, scales, zeros, groups)

    return make


def fp8(block: tuple[int, int] | None, *, per_tensor: bool = False, static: str = "", name: str = "weight_scale"):
    """static: what scales of activations are called; "" = there are none."""

    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or (len(weight) if per_tensor else 1, weight.shape[1])
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scale = torch.zeros(grid)
        for row in range(grid[0]):
            for column in range(grid[1]):
                part = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
                scale[row, column] = part.abs().max() / 448
        whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(weight), : weight.shape[1]]
        stored = {"weight": (weight / whole).to(E4M3), name: scale.flatten()[0] if per_tensor else scale}
        if static:
            stored[static] = torch.tensor(0.1)
        return stored, stored["weight"].float() * whole

    return make


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def nvfp4(modelopt: bool) -> Maker:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        whole = weight.abs().max() / (448 * 6)
        blocks = weight.unflatten(1, (-1, 16))
        scale = (blocks.abs().amax(-1) / 6 / whole).to(E4M3)
        each = (scale.float() * whole)[..., None].clamp(min=1e-12)
        numbers = torch.tensor(FP4)
        nearest = ((blocks / each).abs()[..., None] - numbers).abs().argmin(-1)
        codes = (nearest + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
        stood = (numbers[nearest] * blocks.sign() * scale.float()[..., None]).flatten(1)
        packed = codes[:, ::2] + 16 * codes[:, 1::2]
        if modelopt:
            found = {
                "weight": packed,
                "weight_scale": scale,
                "weight_scale_2": whole,
                "input_scale": torch.tensor(0.1),
            }
            return found, stood * whole
        over = 1 / whole
        found = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": over.reshape(1)}
        return found | {"input_global_scale": torch.ones(1)}, stood / over

    return make


def compressed(kind: str, bits: int, layout: str, strategy: str, **weights: object) -> dict[str, object]:
    """A quantization_config as llm-compressor writes it."""
    activations = weights.pop("activations", None)
    held = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        "group_size": None,
    }
    group = {"targets": ["Linear"], "weights": held | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_TOKENS = INT8_TOKENS | {"type": "float"}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False}
GPTQ_16 = GPTQ | {"group_size": 16}
GPTQ_8 = GPTQ | {"bits": 8, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["gate"]}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(-1).clamp(min=1e-30) / 6).log2().ceil()
    each = exponents.exp2()[..., None]
    numbers = torch.tensor(FP4)
    nearest = ((blocks / each).abs()[..., None] - numbers).abs().argmin(-1)
    codes = (nearest + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    stored = {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, (numbers[nearest] * blocks.sign() * each).flatten(1)


FORMATS: dict[str, tuple[Mapping[str, object], Maker]] = {
    "int8": (compressed("int", 8, "int-quantized", "channel", activations=INT8_TOKENS), int8),
    "int4": (compressed("int", 4, "pack-quantized", "group", group_size=32), pack_quantized(32)),
    "int4 zeros": (
        compressed("int", 4, "pack-quantized", "group", group_size=16, symmetric=False),
        pack_quantized(16, symmetric=False),
    ),
    "int4 channel": (compressed("int", 4, "pack-quantized", "channel"), pack_quantized(-1)),
    "fp8 tensor": (
        compressed("float", 8, "float-quantized", "tensor", activations=FP8_TOKENS),
        fp8(None, per_tensor=True),
    ),
    "fp8 channel": (compressed("float", 8, "float-quantized", "channel"), fp8(None)),
    "fp8 block": (
        compressed("float", 8, "float-quantized", "block", block_structure=[32, 16], activations=FP8_TOKENS),
        fp8((32, 16)),
    ),
    "deepseek": (BLOCK | {"weight_block_size": [24, 32]}, fp8((24, 32), name="weight_scale_inv")),
    "mistral": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        fp8(None, per_tensor=True, static="activation_scale", name="weight_scale_inv"),
    ),
    "gptq": (GPTQ_16, gptq(16)),
    "gptq v2": (GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, gptq(-1, v2=True)),
    "gptq 8 bits": (GPTQ_8 | {"group_size": 16}, gptq8(16)),
    "gptq v2 8 bits": (GPTQ_8 | {"group_size": -1, "checkpoint_format": "gptq_v2"}, gptq8(-1, v2=True)),
    "int8 packed groups": (compressed("int", 8, "pack-quantized", "group", group_size=32), pack_quantized8(32)),
    "int8 groups": (compressed("int", 8, "int-quantized", "group", group_size=8), int8_groups(8)),
    "int8 packed": (compressed("int", 8, "pack-quantized", "channel"), pack_quantized8(-1)),
    "awq": (AWQ | {"group_size": 32}, awq(32)),
    "modelopt fp8": (
        MODELOPT | {"quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]},
        fp8(None, per_tensor=True, static="input_scale"),
    ),
    "modelopt nvfp4": (MODELOPT | {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, nvfp4(True)),
    "nvfp4": (compressed("float", 4, "nvfp4-pack-quantized", "tensor_group", group_size=16), nvfp4(False)),
    "mxfp4": (compressed("float", 4, "mxfp4-pack-quantized", "group", group_size=32), mxfp4),
}
# One rank alone: groups have inputs of all.
REORDERED: dict[str, tuple[Mapping[str, object], Maker]] = {
    "gptq desc_act": (GPTQ_16 | {"desc_act": True}, gptq(16, shuffled=True)),
    "int4 actorder": (
        compressed("int", 4, "pack-quantized", "group", group_size=16, actorder="group"),
        pack_quantized(16, shuffled=True),
    ),
}
PLAIN = ("lm_head", "embed_tokens", "mlp.gate", "shared_expert_gate", "norm")


def store(
    plain: Path,
    folder: Path,
    found: Mapping[str, object],
    make: Maker | Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    skip: tuple[str, ...] = (),
) -> None:
    """Write `folder`/stored, quantised as told, and `folder`/plain, with what that stands for in float32.

    make: may take the name of a tensor, too. skip: ends of names of modules that stay plain.
    """
    named = len(signature(make).parameters) == 2
    tensors = load_file(plain / "model.safetensors")
    stored, stands_for = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or not name.endswith(".weight") or any(module.endswith(each) for each in (*PLAIN, *skip)):
            stored[name] = stands_for[name] = tensor
            continue
        parts, stands_for[name] = make(name, tensor.float()) if named else make(tensor.float())
        stored |= {f"{module}.{leaf}": part.contiguous().clone() for leaf, part in parts.items()}
    for kind, held in (("stored", stored), ("plain", stands_for)):
        shutil.copytree(plain, folder / kind)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / kind / "model.safetensors")
    edit(folder / "stored", quantization_config=found)


def edit(folder: Path, **values: object) -> None:
    """Set fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def config(folder: Path, **values: object) -> EngineConfig:
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 4, "device": "cpu", **values})


def oracle(folder: Path) -> transformers.PreTrainedModel:
    """Return what the stored checkpoint in `folder` stands for, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager").eval()


def made(models, folder: Path, name: str, kind: str, skip: tuple[str, ...] = ()):
    """Store model `name` as `kind` says; return the oracle, and how the engine is to load it."""
    store(models(name)[1], folder, *(FORMATS | REORDERED)[kind], skip)
    return oracle(folder), config(folder / "stored", dtype="float32")
