"""Sizes of the Triton attention kernels: what was measured to be fastest, and what is taken elsewhere.

`python -m tests.bench.tune_attention` measures the GPU that it runs on and prints rows for `MEASURED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


# Nothing was measured yet.
MEASURED: Mapping[Shape, Tuning] = MappingProxyType({})


def tuning_of(spec: AttentionSpec, gpu: str) -> Tuning:
    """Return the tuning for a model on a GPU: a measured one, else `unmeasured`."""
    return MEASURED.get(shape_of(spec, gpu)) or unmeasured(spec)


def shape_of(spec: AttentionSpec, gpu: str) -> Shape:
    """Return what a tuning of this model on this GPU is kept under."""
    return Shape(gpu, spec.head_dim, spec.group, str(spec.dtype).removeprefix("torch."), spec.fp8_cache)


def unmeasured(spec: AttentionSpec) -> Tuning:
    """Return sizes that fit the registers and the shared memory of GPUs from compute capability 8.0; not measured."""
    width = padded(spec.head_dim) * spec.dtype.itemsize  # bytes of a key
    group = padded(spec.group)
    keys = 64 if width <= 256 else 32 if width <= 512 else 16
    rows = 128 if width <= 128 else 64
    if spec.dtype is torch.float32:  # whose products take three times the registers
        rows = 32 if width <= 512 else 16

    def tile(rows: int) -> Tile:
        return Tile(rows, keys, 8 if rows > 64 and width > 128 else 4, 2)

    return Tuning(tile(group), tile(max(rows, group)), waves=2)


def padded(size: int) -> int:
    """Return the power of two, from 16, that a matrix unit takes `size` for."""
    return max(16, 1 << (size - 1).bit_length())
