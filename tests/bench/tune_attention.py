"""Finds the fastest sizes of the Triton attention kernels on this GPU: `python -m tests.bench.tune_attention`.

Prints a row for `MEASURED` of engine/attention/triton_fit.py, and what it was measured on. Nothing else may run then.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from engine.attention.base import AttentionSpec
from engine.attention.triton_fit import OVERLAPPING, Tile, Tuning, padded, shape_of, unmeasured
from tests.bench.gpu.machine import machine
from tests.bench.gpu.part_attention import Case, calls_of, plain_spec
from tests.bench.gpu.timing import rotations, seconds_per_call

REPEATS = 5
WARM_SECONDS = 0.05
DECODES = [Case("triton", 1, 8192), Case("triton", 32, 1024), Case("triton", 32, 8192), Case("triton", 256, 1024)]
PROMPTS = [Case("triton", 1, 8192, new=8192), Case("triton", 8, 1024, new=1024), Case("triton", 1, 16384, new=2048)]

Candidate = TypeVar("Candidate")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing can be tuned", file=sys.stderr)
        return 1
    heads, dtype = (asked.heads, asked.kv_heads, asked.head_dim), getattr(torch, asked.dtype)
    spec = plain_spec(*heads, asked.block_size, dtype, torch.device("cuda:0"), asked.fp8)
    tuning = tune(spec)
    found = machine(spec.device)
    print(f"    # {found['date']}, {found['versions']}, clocks {found['clocks']}")
    print(f"    {shape_of(spec, found['gpu'])}: {tuning},")
    return 0


def tune(spec: AttentionSpec, decodes: Sequence[Case] = DECODES, prompts: Sequence[Case] = PROMPTS) -> Tuning:
    """Return the fastest tuning: tiles of decodes, then how many splits these are given, then tiles of prompts."""
    base = unmeasured(spec, torch.cuda.get_device_capability(spec.device))
    by_tile = [replace(base, decode=tile) for tile in decode_tiles(spec)]
    best = fastest(by_tile, decodes, lambda tuning, case: seconds(spec, tuning, case))
    by_waves = [replace(best, waves=waves) for waves in (1, 2, 3, 4, 6, 8)]
    best = fastest(by_waves, decodes, lambda tuning, case: seconds(spec, tuning, case))
    by_prompts = [replace(best, prefill=tile) for tile in prefill_tiles(spec)]
    return fastest(by_prompts, prompts, lambda tuning, case: seconds(spec, tuning, case))


def decode_tiles(spec: AttentionSpec) -> list[Tile]:
    """Return the candidates for decodes; their rows are the group's. With fewer stages no load overlaps a product."""
    sizes = itertools.product((16, 32, 64, 128), (2, 4, 8), (OVERLAPPING, OVERLAPPING + 1, OVERLAPPING + 2))
    return [Tile(padded(spec.group), *size) for size in sizes]


def prefill_tiles(spec: AttentionSpec) -> list[Tile]:
    """Return the candidates for prompts."""
    sizes = itertools.product((64, 128), (32, 64, 128), (4, 8), (OVERLAPPING, OVERLAPPING + 1))
    return [Tile(*size) for size in sizes if size[0] >= padded(spec.group)]


def fastest(
    candidates: Iterable[Candidate], cases: Sequence[Case], measure: Callable[[Candidate, Case], float]
) -> Candidate:
    """Return the candidate with the least product of its seconds over all cases: none weighs more by its size.

    Those that do not fit the GPU are passed over. Raises `RuntimeError` where none fits.
    """
    best, least = None, math.inf
    for candidate in candidates:
        try:
            total = sum(math.log(measure(candidate, case)) for case in cases)
        except Exception as error:
            if not does_not_fit(error):
                raise
            print(f"{candidate}: does not fit", file=sys.stderr)
            continue
        print(f"{candidate}: {math.exp(total / len(cases)) * 1e6:.1f} us in the mean", file=sys.stderr)
        if total < least:
            best, least = candidate, total
    if best is None:
        raise RuntimeError("none of the candidates fits this GPU")
    return best


def does_not_fit(error: Exception) -> bool:
    """Whether Triton says of a kernel that it takes more shared memory or registers than there are."""
    return type(error).__name__ in ("OutOfResources", "PTXASError")


def seconds(spec: AttentionSpec, tuning: Tuning, case: Case) -> float:
    """Return what one layer's attention takes, store included, on inputs that no cache holds."""
    from engine.attention.triton import TritonAttention

    case = replace(case, page=spec.block_size)
    num_bytes = 2 * spec.cache_dtype.itemsize * case.batch * case.context * spec.num_kv_heads * spec.head_dim
    calls = calls_of(TritonAttention(spec, tuning), case, rotations(num_bytes))
    return statistics.median(seconds_per_call(calls, spec.device, REPEATS, case.new == 1, WARM_SECONDS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tune_attention", description=__doc__)
    for flag, default in (("--heads", 32), ("--kv-heads", 8), ("--head-dim", 128), ("--block-size", 16)):
        parser.add_argument(flag, type=int, default=default, help="of one rank; Qwen3-8B's unless given")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--fp8", action="store_true", help="of the KV cache")
    return parser


if __name__ == "__main__":
    sys.exit(main())
