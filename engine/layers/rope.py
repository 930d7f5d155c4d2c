"""Rotary position embeddings: the tables of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.attention.base import AttentionContext
from engine.layers.base import Build, Layer


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and how its frequencies are stretched.

    kind: "default"; "linear" divides all frequencies by `factor`; "llama3" (Llama 3.1) divides the low ones only.
    low_freq_factor, high_freq_factor, original_max_positions: of "llama3" alone.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


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


def _table(rope: RopeSpec, head_dim: int, build: Build) -> Tensor:
    if build.group.device.type == "meta":  # torch.arange would import torch._dynamo there: 2 s at every start
        return torch.empty(build.max_positions, 2, head_dim // 2, dtype=torch.float32, device="meta")
    positions = torch.arange(build.max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.stack((angles.cos(), angles.sin()), 1).to(build.group.device)


class Rotary(Layer):
    """cos and sin of every position, in fp32; one for all layers that rotate alike.

    table: [max_positions, 2, head_dim / 2].
    """

    def __init__(self, rope: RopeSpec, head_dim: int, build: Build) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.table = _table(rope, head_dim, build)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of these positions: [num_tokens] -> [num_tokens, 2, head_dim / 2]."""
        return self.table.index_select(0, positions)

    def forward(self, positions: Tensor, context: AttentionContext) -> Any:
        """Return how a step's tokens are rotated, as `MergedHeads` takes it."""
        angles = self.rows(positions)
        return angles if context.backend.rotates else self.kernels.rotation(angles)
