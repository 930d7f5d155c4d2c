"""Weights in NVFP4, made plain as they are loaded: numbers of 4 bits (E2M1) in groups of 16 that share an e4m3 scale.

    modelopt               weight [out, in / 2] uint8, weight_scale [out, in / 16] e4m3, weight_scale_2 fp32
    nvfp4-pack-quantized   weight_packed, weight_scale likewise, weight_global_scale fp32, by which is divided

Of two numbers in a byte the first is in the low half.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels.base import E4M3
from engine.quantization.layout import checked, read_as
from engine.quantization.mxfp4 import MAGNITUDES
from engine.quantization.spec import FIELD, QuantizationSpec
from parallel.parameter import Recipe, StoredTensor


def plain_nvfp4(spec: QuantizationSpec, outs: int, ins: int, dtype: torch.dtype) -> Recipe:
    """Return how a plain weight [out, in] is made. Raises `CheckpointError` for a size that is not stored so."""
    if ins % spec.group:
        raise CheckpointError(
            f"{FIELD}: a weight [{outs}, {ins}] cannot be stored so: its {ins} inputs are no multiple of {spec.group}"
        )
    modelopt = spec.layout == "modelopt"
    codes, whole = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    tensors: dict[str, StoredTensor] = {
        **read_as(codes, (outs, ins // 2), (torch.uint8,)),
        **read_as("weight_scale", (outs, ins // spec.group), (E4M3,)),
        **read_as(whole, None, (torch.float32,)),
    }

    def make(read: Mapping[str, Tensor]) -> Tensor:
        scale, all_of_it = checked(read["weight_scale"], "weight_scale"), checked(read[whole], whole)
        if all_of_it.numel() != 1 or not bool(all_of_it > 0):
            raise ValueError(f"{whole} is no positive number")
        scale = scale * all_of_it if modelopt else scale / all_of_it
        return _dequantised(read[codes], scale, dtype)

    return Recipe(tensors, make)


def _dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in / 2] uint8 and [out, groups] fp32 -> [out, in]."""
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    numbers = torch.stack((values[(codes & 0xF).int()], values[(codes >> 4).int()]), dim=-1)
    outs, groups = scale.shape
    return numbers.view(outs, groups, -1).mul_(scale.unsqueeze(-1)).view(outs, -1).to(dtype)
