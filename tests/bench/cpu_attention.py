"""Attention on a CPU beside torch's own, by what CPUs have: `python -m tests.bench.cpu_attention`.

16 heads of 128 features, 8 of keys and values. `prompt`: a whole prompt is stored in the cache and attended;
torch's `scaled_dot_product_attention` gets the same without a cache. `decode`: one token each of many sequences, for
which torch has nothing over pages. Figures are milliseconds of the thread's CPU time, the least of several rounds in
which both take turns; a process for each CPU, in which torch and its libraries are told the same as our kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.attention.base import LayerCache
from engine.attention.native import NativeAttention
from engine.inputs.step_buffers import to_device
from engine.kernels.compiler import ISA_VARIABLE, isas
from tests.bench.machine import provenance
from tests.parity.step_layouts import make_step
from tests.parity.test_attention import spec

HEADS, KV_HEADS, SIZE, BLOCK = 16, 8, 128, 16
PROMPTS = (512, 2048)  # tokens
DECODES = ((32, 512), (4, 4096))  # sequences, and tokens before each one's last
# What oneDNN, torch and MKL are to take the CPU for.
OTHERS = {
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512_E3"),
    "amx": ("DEFAULT", "avx512", "AVX512_E5"),
}
VARIABLES = (ISA_VARIABLE, "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def least(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least milliseconds of this thread for each way, which take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            best[name] = min(best[name], 1e3 * (time.thread_time() - began))
    return best


def ours(dtype: torch.dtype, computed: list[int], lengths: list[int]) -> Callable[[], object]:
    """Return what stores and attends to `lengths` tokens of sequences, behind `computed` of each."""
    made = NativeAttention.create(
        spec(dtype=dtype, head_dim=SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, block_size=BLOCK)
    )
    if made is None:
        raise SystemExit("no C compiler is installed: there is nothing to compare")
    blocks = sum(-(-(a + b) // BLOCK) for a, b in zip(computed, lengths, strict=True)) + 1
    cache = LayerCache(*torch.randn(2, blocks, BLOCK, KV_HEADS, SIZE).to(dtype))
    step = to_device(make_step(computed, lengths, block=BLOCK, num_blocks=blocks), torch.device("cpu"))[0]
    metadata = made.prepare(step)
    query, key, value = (torch.randn(sum(lengths), n, SIZE).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    return lambda: made.forward(query, key, value, cache, metadata, 0)


def torchs(dtype: torch.dtype, length: int) -> Callable[[], object]:
    """Return what attends to a prompt by torch; heads of keys and values are repeated before."""
    query, key, value = (torch.randn(1, HEADS, length, SIZE).to(dtype) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(isa: str, rounds: int) -> None:
    """Print a row for each case."""
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{isa}, {str(dtype).removeprefix('torch.')}"
        for length in PROMPTS:
            best = least({"ours": ours(dtype, [0], [length]), "torch": torchs(dtype, length)}, rounds)
            rate = 2 * length * (length + 1) * HEADS * SIZE / best["ours"] / 1e6
            print(
                f"| {name} | prompt of {length} | {best['ours']:.1f} | {rate:.0f} | {best['torch']:.1f} "
                f"| {best['torch'] / best['ours']:.2f} |",
                flush=True,
            )
        for count, context in DECODES:
            best = least({"ours": ours(dtype, [context - 1] * count, [1] * count)}, 3 * rounds)
            rate = 2 * count * context * KV_HEADS * SIZE * dtype.itemsize / best["ours"] / 1e6
            print(f"| {name} | decode, {count} at {context} | {best['ours']:.1f} | {rate:.0f} GB/s | | |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", choices=list(OTHERS), help="measure in this process, as this CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.isa:
        measure(options.isa, options.rounds)
        return
    machine = provenance()["machine"]
    print(f"{machine['cpu']}, load {machine['load_before']}, torch {torch.__version__}, one thread\n")
    print("| taken for | case | ours, ms | GFLOP/s | torch, ms | torch / ours |")
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for isa in isas():
        told = dict(zip(VARIABLES, (isa, *OTHERS[isa]), strict=True))
        command = [sys.executable, "-m", "tests.bench.cpu_attention", "--isa", isa, "--rounds", str(options.rounds)]
        subprocess.run(command, env=os.environ | told, check=True)


if __name__ == "__main__":
    main()
