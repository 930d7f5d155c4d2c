"""Launches every attention kernel once, at real shapes, for the compiler: run by test_triton_attention.py."""

import torch

from engine.attention.triton import TritonAttention
from tests.triton_compiler import instead_of_launching, show
from tests.unit.paged_lab import Lab, spec

QWEN3 = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
GEMMA = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "softcap": 50.0, "windows": (64,)}
CASES = [
    ("bf16", 90, QWEN3),
    ("window and softcap", 90, QWEN3 | GEMMA),
    ("fp8 cache", 90, QWEN3 | {"fp8_cache": True}),
    ("fp32", 90, QWEN3 | {"dtype": torch.float32}),
    ("odd head", 80, QWEN3 | {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80, "block_size": 256}),
]


def launch(case, capability, values):
    with instead_of_launching(capability) as kernels:
        lab = Lab(spec(**values), [(500, 1), (30, 40)])
        backend = TritonAttention(lab.spec)
        window = lab.spec.windows[0]
        for programs in (1, 100):  # keys of a decode in one piece, and split
            backend._programs = programs
            backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), window)
        backend.forward_merged(lab.heads(True, True), lab.cache, backend.prepare(lab.step), window)
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        show(case, name, kernel)


if __name__ == "__main__":
    for one in CASES:
        launch(*one)
