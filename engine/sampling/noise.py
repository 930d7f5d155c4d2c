"""Random numbers that depend on nothing but their key: (seed, choice, position) of a token and an index.

No generator and no state: a request draws the same tokens alone, in any batch, on any replica and after a migration.
The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators"),
in int64 arithmetic that wraps alike on CPU and CUDA.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

Unsigned = NDArray[np.uint64]


def row_keys(seeds: NDArray[np.int64], choices: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return one well-mixed 64-bit key per row; all arrays are [num_rows]."""
    key = _mix_host(seeds.astype(np.int64).view(np.uint64))
    for part in (choices, positions):
        key = _mix_host(key + part.astype(np.uint64))
    return key.view(np.int64)


def gumbel(keys: Tensor, indices: Tensor) -> Tensor:
    """Return fp64 Gumbel noise: keys [num_rows] int64, indices [num_rows or 1, n] int64 -> [num_rows, n].

    Uniforms have 53 bits, so that the largest values, which decide the race, are not rounded into ties.
    """
    bits = _mix(keys[:, None] + (indices + 1) * _signed(GOLDEN))
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix_host(x: Unsigned) -> Unsigned:
    with np.errstate(over="ignore"):
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return torch.bitwise_and(x >> bits, (1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
