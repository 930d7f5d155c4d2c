"""Launches products with coded weights at real shapes, for the compiler: run by test_triton_quantised.py."""

import torch

from engine.kernels.base import E4M3, FourBits
from engine.kernels.triton_coded import TritonBlockLinear, TritonFourBitLinear
from tests.triton_compiler import instead_of_launching, show

OUTS, INS = 4096, 12288  # of Qwen3-8B: the way back of an MLP


def four_bits(group: int, floats: bool = False) -> TritonFourBitLinear:
    groups = INS // group
    zero = None if floats else torch.full((OUTS, groups), 8, dtype=torch.uint8)
    # Scales in groups of 32 are exponents, as MXFP4's, in groups of 16 of e4m3, as NVFP4's, in others as on disk.
    held = {16: E4M3, 32: torch.uint8, 128: torch.bfloat16, INS: torch.float16}
    scale = torch.ones(OUTS, groups, dtype=held.get(group, torch.float32))
    whole = torch.ones(OUTS) if group == 16 else None
    return TritonFourBitLinear(FourBits(torch.zeros(OUTS, INS // 2, dtype=torch.uint8), scale, zero, whole))


def eight_bits(dtype: torch.dtype, *blocks: int) -> TritonBlockLinear:
    return TritonBlockLinear(torch.zeros(OUTS, INS).to(dtype), torch.ones(*blocks))


CASES = {
    "int4": (four_bits(128), torch.bfloat16),
    "int4 channel": (four_bits(INS), torch.float16),
    "mxfp4": (four_bits(32, floats=True), torch.bfloat16),
    "nvfp4": (four_bits(16, floats=True), torch.bfloat16),
    "fp8": (eight_bits(E4M3, OUTS, 1), torch.bfloat16),
    "fp8 blocks": (eight_bits(E4M3, OUTS // 128, INS // 128), torch.bfloat16),
    "int8 groups": (eight_bits(torch.int8, OUTS, INS // 128), torch.bfloat16),
    "fp32": (four_bits(64), torch.float32),
}

if __name__ == "__main__":
    for case, (method, dtype) in CASES.items():
        with instead_of_launching(90) as kernels:
            for rows in (1, 7, 64):
                method.apply(torch.zeros(rows, INS, dtype=dtype), torch.zeros(OUTS, dtype=dtype))
        for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
            show(case, name, kernel)
