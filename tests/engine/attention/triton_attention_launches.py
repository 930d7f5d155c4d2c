"""Launches every attention kernel once, at real shapes, for the compiler: run by test_triton_attention.py."""

from dataclasses import replace

import torch

from engine.attention.base import MergedHeads
from engine.attention.triton import TritonAttention
from engine.attention.triton_fit import LEAST_SHARED, SHARED, shared_bytes, unmeasured
from engine.attention.triton_latent import TritonLatentAttention
from engine.attention.varlen import unfit_for_paged_varlen
from engine.attention.whole_prompts import TorchPrompts
from engine.kernels.base import TorchKernels
from tests.engine.paged_lab import Lab, spec
from tests.triton_compiler import instead_of_launching, show

# What is told of them lies at addresses that divide by 16, and at others.
STEPS = [[(500, 1), (30, 40)], [(500, 1), (600, 1), (3, 1), (90, 41)], [(160, 1), (400, 1)]]
QWEN3 = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
GEMMA = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "softcap": 50.0, "windows": (64,)}
CASES = [
    ("bf16", 90, QWEN3),
    ("batch invariant", 90, QWEN3 | {"batch_invariant": True}),
    ("sinks", 90, QWEN3 | {"num_heads": 64, "head_dim": 64, "sinks": True, "windows": (128,)}),
    ("window and softcap", 90, QWEN3 | GEMMA),
    ("fp8 cache", 90, QWEN3 | {"fp8_cache": True}),
    ("fp32", 90, QWEN3 | {"dtype": torch.float32}),
    ("largest group", 90, QWEN3 | {"num_heads": 128, "num_kv_heads": 1}),
    ("bf16 elsewhere", 86, QWEN3),
    ("wide head elsewhere", 86, QWEN3 | GEMMA),
    ("largest head in fp32", 86, QWEN3 | {"head_dim": 256, "dtype": torch.float32}),
    ("odd head", 80, QWEN3 | {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80, "block_size": 256}),
]


DEEPSEEK = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "latent": 512, "dtype": torch.bfloat16}
LATENT = [
    ("latent", 90, DEEPSEEK),
    ("latent, all heads", 90, DEEPSEEK | {"num_heads": 128}),
    ("latent, 20 heads", 90, DEEPSEEK | {"num_heads": 20}),
    ("latent on A100", 80, DEEPSEEK),
    ("latent elsewhere", 86, DEEPSEEK),
]


def launch_latent(case, capability, values):
    with instead_of_launching(capability) as kernels:
        wanted, target = spec(**values), divmod(capability, 10)
        tuning = unmeasured(wanted, target)
        backend = TritonLatentAttention(wanted, tuning)
        for shapes in STEPS:
            lab = Lab(replace(wanted, head_dim=576), shapes)
            merged = lab.merged[:, : wanted.num_heads + 1]
            for programs in (1, 100):
                backend._processors = programs
                heads = MergedHeads(merged, None, None, 0.0, TorchKernels().norm_rotate)
                backend.forward_merged(heads, lab.cache, backend.prepare(lab.step), 0)
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        show(case, name, kernel, foretold=SHARED.get(target, LEAST_SHARED), room=SHARED.get(target, LEAST_SHARED))


def why_not_torch(wanted):
    """Return why whole prompts are not torch's, as on a GPU."""
    return unfit_for_paged_varlen(replace(wanted, device=torch.device("cuda")))


def launch(case, capability, values):
    with instead_of_launching(capability) as kernels:
        wanted, target = spec(**values), divmod(capability, 10)
        tuning = unmeasured(wanted, target)
        backend = TritonAttention(wanted, tuning)
        window = backend.spec.windows[0]
        for shapes in STEPS:
            lab = Lab(backend.spec, shapes)
            for programs in (1, 100):  # keys of a decode in one piece, and split
                backend._processors = programs
                backend.forward(*lab.split(), lab.cache, backend.prepare(lab.step), window, lab.sinks())
            backend.forward_merged(lab.heads(True, True), lab.cache, backend.prepare(lab.step), window)
        if why_not_torch(wanted) is None:
            torchs = TorchPrompts(wanted)
            torchs._attention, torchs._into = None, lambda *ragged, **settings: None
            backend, lab = TritonAttention(wanted, tuning, torchs), Lab(wanted, [(0, 40)])
            backend.forward_merged(lab.heads(True, True), lab.cache, backend.prepare(lab.step), window)
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        most = max(shared_bytes(tile, wanted, target) for tile in (tuning.decode, tuning.prefill))
        show(case, name, kernel, foretold=most, room=SHARED.get(target, LEAST_SHARED))


if __name__ == "__main__":
    for one in CASES:
        launch(*one)
    for one in LATENT:
        launch_latent(*one)
