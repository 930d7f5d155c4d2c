"""Sizes of the Triton attention kernels: what was measured to be fastest, and what is taken elsewhere.

`python -m tests.bench.tune_attention` measures the GPU that it runs on and prints rows for `MEASURED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.attention.base import AttentionSpec


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
OVERLAPPING = 3  # stages from which on keys and values are loaded beside the products of those before them

# Nothing was measured yet.
MEASURED: Mapping[Shape, Tuning] = MappingProxyType({})


def tuning_of(spec: AttentionSpec, gpu: str, capability: Capability) -> Tuning:
    """Return the tuning for a model on a GPU: a measured one, else `unmeasured`."""
    return MEASURED.get(shape_of(spec, gpu)) or unmeasured(spec, capability)


def shape_of(spec: AttentionSpec, gpu: str) -> Shape:
    """Return what a tuning of this model on this GPU is kept under."""
    return Shape(gpu, spec.head_dim, spec.group, str(spec.dtype).removeprefix("torch."), spec.fp8_cache)


def unmeasured(spec: AttentionSpec, capability: Capability = SMALLEST) -> Tuning:
    """Return sizes that fit registers and shared memory of a GPU from compute capability 8.0; not measured."""
    width = padded(spec.head_dim) * spec.dtype.itemsize  # bytes of a key
    group = padded(spec.group)
    keys = 64 if width <= 256 else 32 if width <= 512 else 16
    rows = 128 if width <= 128 else 64
    if spec.dtype is torch.float32:  # whose products take three times the registers
        rows = 32 if width <= 512 else 16
    room = SHARED.get(capability, LEAST_SHARED)

    def tile(rows: int) -> Tile:
        wide = Tile(rows, keys, 8 if rows > 64 and width > 128 else 4, OVERLAPPING)
        return wide if shared_bytes(wide, spec, capability) <= room else replace(wide, stages=OVERLAPPING - 1)

    return Tuning(tile(group), tile(max(rows, group)), waves=4)


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
