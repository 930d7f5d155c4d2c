"""Whether the Triton attention kernels fit a model here, and with which sizes: measured ones, or a guess.

Needs no Triton. `python -m tests.bench.tune_attention` measures the GPU that it runs on and prints rows for
`MEASURED`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.attention.base import AttentionSpec
from engine.device.gpu import lacks, why_no_triton


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts its work.

    rows: queries times heads of a KV head's group that a program takes. keys: that it reads at a time. Both are
    powers of two from 16. warps, stages: see Triton's launch options.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of decoding and of prompts; waves: programs per multiprocessor that splits are made for."""

    decode: Tile
    prefill: Tile
    waves: int


class Shape(NamedTuple):
    """What a tuning was measured for: GPU by torch's name of it, and what `AttentionSpec` calls so."""

    gpu: str
    head_dim: int
    group: int
    dtype: str
    fp8_cache: bool


Capability = tuple[int, int]

# Bytes of shared memory that a program may have, by compute capability; all others have LEAST_SHARED.
SHARED: Mapping[Capability, int] = MappingProxyType(
    dict.fromkeys(((8, 0), (8, 7)), 163 << 10) | dict.fromkeys(((9, 0), (10, 0), (10, 3)), 227 << 10)
)
LEAST_SHARED = 99 << 10
SMALLEST: Capability = (8, 6)
HOPPER: Capability = (9, 0)
OVERLAPPING = 3  # stages from which on keys and values are loaded beside the products of those before them

# By `tests.bench.gpu --only tuning` on 26 November 2026; torch 2.11, Triton 3.6.
MEASURED: Mapping[Shape, Tuning] = MappingProxyType(
    {
        Shape(gpu="NVIDIA H100 80GB HBM3", head_dim=128, group=4, dtype="bfloat16", fp8_cache=False): Tuning(
            decode=Tile(rows=16, keys=64, warps=4, stages=3),
            prefill=Tile(rows=128, keys=64, warps=8, stages=3),
            waves=1,
        )
    }
)


def tuning_of(spec: AttentionSpec, gpu: str, capability: Capability) -> Tuning:
    """Return the tuning for a model on a GPU: a measured one, else `unmeasured`."""
    return MEASURED.get(shape_of(spec, gpu)) or unmeasured(spec, capability)


def shape_of(spec: AttentionSpec, gpu: str) -> Shape:
    """Return what a tuning of this model on this GPU is kept under."""
    return Shape(gpu, spec.head_dim, spec.group, str(spec.dtype).removeprefix("torch."), spec.fp8_cache)


def unmeasured(spec: AttentionSpec, capability: Capability = SMALLEST) -> Tuning:
    """Return sizes that fit registers and shared memory of a GPU from compute capability 8.0; not measured.

    Those of Hopper are like the measured ones: for heads of 128 features, prompts took 13 % less with 128 rows than
    with 64, decodes 7 % less with one wave than with four.
    """
    hopper = capability == HOPPER
    if spec.latent:
        return _unmeasured_latent(spec, capability)
    width = padded(spec.head_dim) * spec.dtype.itemsize  # bytes of a key
    group = padded(spec.group)
    keys = 64 if width <= 256 else 32 if width <= 512 else 16
    rows = 128 if width <= (256 if hopper else 128) else 64
    if spec.dtype is torch.float32:  # whose products take three times the registers
        rows = 32 if width <= 512 else 16
    room = SHARED.get(capability, LEAST_SHARED)

    def tile(rows: int) -> Tile:
        wide = Tile(rows, keys, 8 if rows > 64 and width > 128 else 4, OVERLAPPING)
        return wide if shared_bytes(wide, spec, capability) <= room else replace(wide, stages=OVERLAPPING - 1)

    return Tuning(tile(group), tile(max(rows, group)), waves=1 if hopper else 4)


def _unmeasured_latent(spec: AttentionSpec, capability: Capability) -> Tuning:
    roomy = SHARED.get(capability, LEAST_SHARED) > LEAST_SHARED
    heads = padded(heads_together(spec.num_heads))
    # Sums of 64 rows take nearly all registers of eight warps: none are left to number tokens by a division.
    rows = max(heads, (64 if heads == heads_together(spec.num_heads) else 32) if roomy else 16)

    def tile(rows: int) -> Tile:
        return Tile(rows, 32 if roomy else 16, 8 if rows > 16 else 4, OVERLAPPING - 1)

    return Tuning(tile(heads), tile(rows), waves=4)


def heads_together(heads: int) -> int:
    """Return how many heads that share one latent key a program takes: a divisor of `heads`."""
    return max(size for size in range(1, MAX_LATENT_HEADS + 1) if heads % size == 0)


def shared_bytes(tile: Tile, spec: AttentionSpec, capability: Capability) -> int:
    """Return the most shared memory that a program of `attend` takes, in bytes."""
    size, width = spec.dtype.itemsize, padded(spec.head_dim) * spec.dtype.itemsize
    # Matrix units of these read keys and values where they lie: those in use need a buffer beside those that come.
    in_place = capability[0] in (9, 10) and tile.rows >= 64 and size < 4
    buffers = tile.stages if in_place else tile.stages - 1
    queries, weights = tile.rows * width, 0 if in_place else tile.rows * tile.keys * size
    halves = 2 if size == 4 else 1  # fp32 is multiplied in two parts
    return halves * (queries + weights) + 2 * buffers * tile.keys * width


def padded(size: int) -> int:
    """Return the power of two, from 16, that a matrix unit takes `size` for."""
    return max(16, 1 << (size - 1).bit_length())


MAX_HEAD_DIM = 256
MAX_GROUP = 128
MAX_LATENT = 512  # features of a latent value
MAX_LATENT_HEADS = 16  # of a program, whose sums are as wide as the value
MAX_QUERIES = 32 << 10  # bytes of a KV head's group of queries, which a program holds beside tiles of keys and values
LEAST_PAGE = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert float8_e4m3fn


def why_not_triton(spec: AttentionSpec) -> str | None:
    """Return why the Triton kernels cannot serve this model here, None when they can."""
    return why_not_here(spec) or unfit_for_triton(spec)


def why_not_here(spec: AttentionSpec) -> str | None:
    """Return what the device or the installation lacks, None when nothing."""
    if spec.device.type == "cuda":
        return why_no_triton(spec.device) or _why_no_fp8_cache(spec)
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if spec.device.type == "cpu":
        return None if interpreted() else "it needs a CUDA device; TRITON_INTERPRET=1 runs it slowly on a CPU"
    return f"it is for CUDA devices, not for {spec.device.type}"


def unfit_for_triton(spec: AttentionSpec) -> str | None:
    """Return why the kernels serve no such model on any GPU, None when they do."""
    if spec.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 or float16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.block_size < LEAST_PAGE or spec.block_size & (spec.block_size - 1):
        return f"its pages are powers of two from {LEAST_PAGE} tokens, not {spec.block_size}; set block_size to 16"
    return _unfit_latent(spec) if spec.latent else _unfit_heads(spec)


def _unfit_heads(spec: AttentionSpec) -> str | None:
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"head size {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if spec.group > MAX_GROUP:
        return f"{spec.group} query heads share a KV head, more than {MAX_GROUP}"
    if padded(spec.group) * padded(spec.head_dim) * spec.dtype.itemsize > MAX_QUERIES:
        kind = str(spec.dtype).removeprefix("torch.")
        return f"{spec.group} query heads of size {spec.head_dim} in {kind} share a KV head, more than fit a program"
    return None


def _unfit_latent(spec: AttentionSpec) -> str | None:
    rotated = spec.head_dim - spec.latent
    if spec.dtype is torch.float32:
        return "it attends to latent vectors in bfloat16 or float16, not float32"
    if spec.latent > MAX_LATENT or spec.latent % 8 or rotated % 8 or not 0 < rotated <= MAX_HEAD_DIM:
        return f"a latent value of {spec.latent} and {rotated} features; it takes multiples of 8 up to {MAX_LATENT}"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_no_fp8_cache(spec: AttentionSpec) -> str | None:
    found = torch.cuda.get_device_capability(spec.device)
    return lacks(FP8_CAPABILITY, found, "an fp8 cache") if spec.fp8_cache and found < FP8_CAPABILITY else None
