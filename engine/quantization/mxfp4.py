"""Weights in MXFP4, made plain as they are loaded.

Source: OCP Microscaling Formats (MX) Specification 1.0: blocks of 32 numbers of 4 bits (E2M1) share a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# What the 4 bits stand for: sign, two bits of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127
ROWS_AT_ONCE = 1 << 14


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the plain weights: [..., 32 * number of blocks].

    blocks: [..., number of blocks, 16] uint8, each two numbers, the first one in the low half. scales:
    [..., number of blocks] uint8, exponents of 2 counted from -127.
    """
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=dtype)
    flat = blocks.reshape(-1, blocks.shape[-1])
    exponents = scales.reshape(-1, 1).int() - EXPONENT_BIAS
    found = torch.empty(len(flat), flat.shape[1], 2, dtype=dtype)
    for first in range(0, len(flat), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        halves = torch.stack((flat[part] & 0xF, flat[part] >> 4), dim=-1).int()
        torch.ldexp(values[halves], exponents[part].unsqueeze(-1), out=found[part])
    return found.view(*blocks.shape[:-2], -1)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """The weights of a layer's experts, which a checkpoint holds as `name`_blocks and `name`_scales.

    Made transposed, [experts, in, out], as checkpoints that are not quantised hold them.
    """

    name: str
    dtype: torch.dtype

    def tensors(self, read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Return them by their name in the rules. read: returns a tensor of the checkpoint by its name."""
        plain = dequantise_mxfp4(read(f"{self.name}_blocks"), read(f"{self.name}_scales"), self.dtype)
        return {self.name: plain.transpose(1, 2)}
