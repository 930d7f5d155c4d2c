"""Launches every attention kernel once, at real shapes, for the compiler: run by test_triton_attention.py."""

import torch

from engine.attention.triton import TritonAttention
from tests.triton_compiler import instead_of_launching, show
from tests.unit.paged_lab import Lab, spec

# What is told of them lies at addresses that divide by 16, and at others.
STEPS = [[(500, 1), (30, 40)], [(500, 1), (600, 1), (3, 1), (90, 41)], [(160, 1), (400, 1)]]
QWEN3 = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
GEMMA = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "softcap": 50.0, "windows": (64,)}
CASES = [
    ("bf16", 90, QWEN3),
    ("batch invariant", 90, QWEN3 | {"batch_invariant": True}),
    ("window and softcap", 90, QWEN3 | GEMMA),
    ("fp8 cache", 90, QWEN3 | {"fp8_cache": True}),
    ("fp32", 90, QWEN3 | {"dtype": torch.float32}),
    ("largest group", 90, QWEN3 | {"num_heads": 128, "num_kv_heads": 1}),
    ("largest head in fp32", 80, QWEN3 | {"head_dim": 256, "dtype": torch.float32}),
    ("odd head", 80, QWEN3 | {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80, "block_size": 256}),
]


def launch(case, capability, values):
    with instead_of_launching(capability) as kernels:
        backend = TritonAttention(spec(**values))
        window = backend.spec.windows[0]
        for shapes in STEPS:
            lab = Lab(backend.spec, shapes)
            for programs in (1, 100):  # keys of a decode in one piece, and split
                backend._programs = programs
                backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), window)
            backend.forward_merged(lab.heads(True, True), lab.cache, backend.prepare(lab.step), window)
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        show(case, name, kernel)


if __name__ == "__main__":
    for one in CASES:
        launch(*one)
