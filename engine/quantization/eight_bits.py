"""How checkpoints hold weights in eight bits, and how a layer's own tensors, or a plain weight, are made of them.

    weight         [out, in] e4m3 or int8
    weight_packed  [out, in / 4] int32, four inputs in each, counted from -128; compressed-tensors' pack-quantized
    qweight        [in / 4, out] int32, four inputs in each, counted from 0; GPTQ, as AutoGPTQ and GPTQModel write it

Scales are one for all, one for each output, or one for each block of outputs and inputs. GPTQ's are [groups, out],
beside `qzeros` [groups, out / 4] int32, which are all 128, or 127 in `checkpoint_format` gptq, as weights are
symmetric, and `g_idx` [in] int32, the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels.base import E4M3
from engine.quantization.gptq import GROUPS_OF_INPUTS, LESS_ONE, check_adjacent
from engine.quantization.layout import EIGHT_BIT_SCALES, INT32, SCALES, checked, of_outputs, read_as
from engine.quantization.method import parts_of
from engine.quantization.spec import FIELD, QuantizationSpec
from parallel.parameter import Recipe, ShardedParameter

PER_WORD = 4  # numbers of 8 bits in an int32
MIDDLE = 128  # what packed numbers are counted from


def from_e4m3(weight: Tensor) -> Tensor:
    """Return a weight in fp32, a copy."""
    if weight.device.type != "cpu":
        return weight.float()
    # On CPUs torch converts one number at a time; to look them up is six times as fast.
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    return every.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)


def in_fp32(weight: Tensor) -> Tensor:
    """Return a weight in e4m3 or int8 in fp32, a copy."""
    return from_e4m3(weight) if weight.dtype is E4M3 else weight.float()


def scaled_by_blocks(weight: Tensor, scale: Tensor, shares: tuple[int, int]) -> Tensor:
    """Return weight [out, in] times the scales of its blocks [out / rows, in / columns], in fp32."""
    rows, columns = shares
    blocks = in_fp32(weight).view(len(scale), rows, scale.shape[1], columns)
    return blocks.mul_(scale[:, None, :, None]).view(weight.shape)


def check_sizes(spec: QuantizationSpec, name: str, weight: ShardedParameter) -> None:
    """Raise `CheckpointError` where no weight of the layer `name` is stored so. weight: the plain one."""
    ins = weight.full_shape()[1]
    for outs in parts_of(weight) if spec.is_gptq else ():
        if outs % PER_WORD or ins % PER_WORD:
            raise CheckpointError(
                f"{FIELD}: {name} cannot be stored so: of {outs} outputs and {ins} inputs, {PER_WORD} of each lie in "
                "one int32"
            )


def eight_bit_weight(spec: QuantizationSpec, outs: int, ins: int) -> Recipe:
    """Return how a weight [outs, ins] in eight bits is made."""
    if spec.is_gptq:
        group = min(spec.block[1], ins) if spec.block else ins
        return Recipe(
            read_as("qweight", (ins // PER_WORD, outs), INT32),
            lambda read: _unpacked(read, outs, ins, group),
            read_as("g_idx", (ins,), GROUPS_OF_INPUTS),
        )
    if spec.packed:
        return Recipe(
            read_as("weight_packed", (outs, -(-ins // PER_WORD)), INT32),
            lambda read: (read["weight_packed"].contiguous().view(torch.uint8)[:, :ins] ^ MIDDLE).view(torch.int8),
        )
    dtype = E4M3 if spec.weights == "fp8" else torch.int8
    return Recipe(read_as("weight", (outs, ins), (dtype,)), lambda read: read["weight"])


def _unpacked(read: Mapping[str, Tensor], outs: int, ins: int, group: int) -> Tensor:
    if "g_idx" in read:
        check_adjacent(read["g_idx"], group)
    counted = read["qweight"].contiguous().view(torch.uint8).view(ins // PER_WORD, outs, PER_WORD)
    return (counted.transpose(0, 1).reshape(outs, ins) ^ MIDDLE).view(torch.int8)


def block_scales(spec: QuantizationSpec, outs: int, ins: int, shares: tuple[int, int]) -> Recipe:
    """Return how the scales of a weight [outs, ins] are made, one for each block of the size `shares`."""
    rows, columns = spec.block or (1, ins)
    rows, columns = min(rows, outs), min(columns, ins)  # a block may be larger than the weight
    stored = (
        gptq_scales(spec, outs, -(-ins // columns)) if spec.is_gptq else _as_stored(spec, outs, ins, rows, columns)
    )

    def make(read: Mapping[str, Tensor]) -> Tensor:
        scales = stored.make(read)
        finer = scales.repeat_interleave(rows // shares[0], 0).repeat_interleave(columns // shares[1], 1)
        return finer[: outs // shares[0], : ins // shares[1]]

    return Recipe(stored.tensors, make)


def _as_stored(spec: QuantizationSpec, outs: int, ins: int, rows: int, columns: int) -> Recipe:
    tensors = read_as(spec.scale_name, (-(-outs // rows), -(-ins // columns)), EIGHT_BIT_SCALES)
    return Recipe(tensors, lambda read: checked(read[spec.scale_name], spec.scale_name))


def gptq_scales(spec: QuantizationSpec, outs: int, groups: int) -> Recipe:
    """Return how GPTQ's scales in fp32 are made: [outs, groups]."""
    zero = MIDDLE - (spec.layout == LESS_ONE)
    tensors = read_as("scales", (groups, outs), SCALES) | read_as("qzeros", (groups, outs // PER_WORD), INT32)

    def make(read: Mapping[str, Tensor]) -> Tensor:
        if bool((read["qzeros"].contiguous().view(torch.uint8) != zero).any()):
            raise ValueError(f"qzeros holds zeros other than {zero}: asymmetric GPTQ in 8 bits is not supported")
        return checked(read["scales"], "scales").t()

    return Recipe(tensors, make)


def plain_eight_bits(spec: QuantizationSpec, outs: int, ins: int, dtype: torch.dtype) -> Recipe:
    """Return how a plain weight [out, in] is made of one in fp8 or int8."""
    weight = eight_bit_weight(spec, outs, ins)
    if spec.block is not None or spec.is_gptq:
        scales = block_scales(spec, outs, ins, (1, 1) if spec.block else (1, ins))
    else:
        scales = Recipe(
            read_as(spec.scale_name, None, EIGHT_BIT_SCALES),
            lambda read: of_outputs(read[spec.scale_name], outs, spec.scale_name).view(-1, 1),
        )
    return Recipe(
        {**weight.tensors, **scales.tensors},
        lambda read: in_fp32(weight.make(read)).mul_(scales.make(read)).to(dtype),
        weight.spare,
    )
