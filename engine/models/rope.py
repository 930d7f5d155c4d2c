"""Rotary position embeddings: tables of cosines and sines, applied to flat tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of features: [head_dim / 2] fp32.

    Source: RoFormer, section 3.4; "llama3" as Llama 3.1's reference code stretches the low frequencies.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    if rope.high_freq_factor == rope.low_freq_factor:
        kept = (turns >= rope.high_freq_factor).float()
    else:
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


class RotaryTable:
    """cos and sin of every position, laid out so that rotating takes three kernels.

    With x = (a, b) in halves the rotation is (a cos - b sin, b cos + a sin) = x * cos + roll(x) * (-sin, sin).
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self.table = table.to(device, dtype)  # [max_positions, 2, head_dim]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of [num_tokens] positions: two of [num_tokens, 1, head_dim]."""
        cos, sin = self.table.index_select(0, positions).split(1, dim=1)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads of x, [num_tokens, heads, head_dim], rotated by their tokens' positions."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
