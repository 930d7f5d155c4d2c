"""Launches products of experts at real shapes, for the compiler: run by test_triton_experts.py."""

import torch

from engine.kernels.triton_experts import TritonGroupedProduct
from parallel.group import SoloGroup
from parallel.linear import ReplicatedLinear
from tests.triton_compiler import instead_of_launching, show

# Of Qwen3-30B-A3B: gate and up of an expert, and its way back.
CASES = [
    ("bf16", torch.bfloat16, torch.bfloat16, (2048, 1536)),
    ("wide", torch.bfloat16, torch.bfloat16, (2048, 8192)),
    ("fp32", torch.float32, torch.float32, (768, 2048)),
    ("int8", torch.int8, torch.bfloat16, (2048, 1536)),
    ("fp8", torch.float8_e4m3fn, torch.bfloat16, (2048, 1536)),
    ("blocks", torch.float8_e4m3fn, torch.bfloat16, (2048, 1536)),
    ("int8 groups", torch.int8, torch.bfloat16, (2048, 1536)),
    ("int4", torch.uint8, torch.bfloat16, (2048, 1536)),
    ("mxfp4", torch.uint8, torch.bfloat16, (2880, 5760)),  # of gpt-oss
    ("nvfp4", torch.uint8, torch.bfloat16, (2048, 1536)),
]


def launch(case, stored, dtype, sizes):
    ins, outs = sizes
    layers = []
    for _ in range(4):
        layer = ReplicatedLinear(ins, outs, False, SoloGroup(), dtype)
        width = ins // 2 if stored is torch.uint8 else ins
        shape = {"blocks": (outs // 128, ins // 128), "int4": (outs, ins // 128), "mxfp4": (outs, ins // 32)}
        shape |= {"nvfp4": (outs, ins // 16), "int8 groups": (outs, ins // 128)}
        layer.weight = torch.nn.Parameter(torch.zeros(outs, width).to(stored), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(torch.ones(shape.get(case, (outs,))), requires_grad=False)
        if case == "int4":
            zero = torch.zeros(outs, ins // 128, dtype=torch.uint8)
            layer.weight_zero = torch.nn.Parameter(zero, requires_grad=False)
        layers.append(layer)
    product = TritonGroupedProduct(layers)
    with instead_of_launching(90) as kernels:
        for rows in (1, 7, 64, 640):
            ends = torch.tensor([rows // 2, rows, rows, rows])
            product.apply(torch.zeros(rows, ins, dtype=dtype), ends)
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        show(case, name, kernel)


if __name__ == "__main__":
    for one in CASES:
        launch(*one)
