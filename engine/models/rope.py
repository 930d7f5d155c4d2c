"""Rotary position embeddings: the tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    """cos and sin of every position, in fp32."""

    def __init__(self, rope: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        self.table = torch.stack((angles.cos(), angles.sin()), 1).to(device)  # [max_positions, 2, head_dim / 2]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        yield self.table

    def rows(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of these positions: [num_tokens] -> [num_tokens, 2, head_dim / 2]."""
        return self.table.index_select(0, positions)
