"""Rotary position embeddings: the tables of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.attention.base import AttentionContext
from engine.layers.base import Build, Layer

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., RoFormer) and how its frequencies are stretched.

    kind: "default"; "linear" divides all frequencies by `factor`; "llama3" (Llama 3.1) divides the low ones only;
    "yarn" (Peng et al., arXiv 2309.00071) divides those that turn less than `low_turns` times within the original
    length, keeps those that turn more than `high_turns` times, and blends between them; "longrope" (Ding et al.,
    arXiv 2402.13753) divides each frequency by its own one of `factors`.
    low_turns, high_turns, original_max_positions: of "llama3" and "yarn". truncate: of "yarn", whether the ends of
    the blend are whole features. attention_factor: of all cosines and sines.
    rotated: the first features of each head that are rotated; 0 = all. interleaved: whether the two features of a
    pair lie side by side (GPT-J) and not half of what is rotated apart (GPT-NeoX).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_max_positions: int = 8192
    truncate: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rotated: int = 0
    interleaved: bool = False

    def feature_order(self, head_dim: int) -> list[int] | None:
        """Return which feature of a checkpoint's head goes to each place; None = each to its own.

        The rotation turns features half a head apart together. So those that are a pair are put there, and the
        features that are not rotated fill what is left. Queries and keys alike: their products stay what they are.
        """
        rotated = self.rotated or head_dim
        if rotated == head_dim and not self.interleaved:
            return None
        half, rest = rotated // 2, (head_dim - rotated) // 2
        first = [2 * pair if self.interleaved else pair for pair in range(half)]
        second = [2 * pair + 1 if self.interleaved else half + pair for pair in range(half)]
        others = list(range(rotated, head_dim))
        return [*first, *others[:rest], *second, *others[rest:]]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of features that is rotated: [rotated / 2] fp32.

    Source: RoFormer, section 3.4; "llama3" as Llama 3.1's reference code, "yarn" as section 3.2 of its paper.
    """
    size = rope.rotated or head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    if rope.kind == "llama3":
        kept = _kept_by_turns(frequencies, rope)
    elif rope.kind == "yarn":
        kept = _kept_by_feature(rope, size)
    else:
        return frequencies
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _kept_by_turns(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Return how much of each frequency is kept, 0 to 1, linear in its turns within the original length."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    if rope.high_turns == rope.low_turns:
        return (turns >= rope.high_turns).float()
    return ((turns - rope.low_turns) / (rope.high_turns - rope.low_turns)).clamp(0.0, 1.0)


def _kept_by_feature(rope: RopeSpec, size: int) -> Tensor:
    """Return how much of each frequency is kept, 0 to 1, linear in its number."""

    def number(turns: float) -> float:
        """Return the pair of features that turns so often within the original length."""
        return size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = number(rope.high_turns), number(rope.low_turns)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001  # one number would divide by zero
    divided = (torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - divided.clamp(0.0, 1.0)


def _table(rope: RopeSpec, head_dim: int, build: Build) -> Tensor:
    if build.group.device.type == "meta":  # torch.arange would import torch._dynamo there: 2 s at every start
        return torch.empty(build.max_positions, 2, head_dim // 2, dtype=torch.float32, device="meta")
    positions = torch.arange(build.max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    table = torch.zeros(build.max_positions, 2, head_dim // 2)
    table[:, 0] = 1.0  # the rest of a head is not rotated
    rotated = angles.shape[1]
    table[:, 0, :rotated] = angles.cos() * rope.attention_factor
    table[:, 1, :rotated] = angles.sin() * rope.attention_factor
    return table.to(build.group.device)


class Rotary(Layer):
    """cos and sin of every position, in fp32; one for all layers that rotate alike.

    table: [max_positions, 2, head_dim / 2]. feature_order: as of `RopeSpec`.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, build: Build) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.table = _table(rope, head_dim, build)
        self.feature_order = rope.feature_order(head_dim)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines of these positions: [num_tokens] -> [num_tokens, 2, head_dim / 2]."""
        return self.table.index_select(0, positions)

    def forward(self, positions: Tensor, context: AttentionContext) -> Any:
        """Return how a step's tokens are rotated, as `MergedHeads` takes it."""
        angles = self.rows(positions)
        return angles if context.backend.rotates else self.kernels.rotation(angles)


class QueryScale(Layer):
    """What queries are multiplied by, growing with their positions (Llama 4, Ministral 3).

    1 + scale * log(1 + floor((position + first) / every)); source: Nakanishi, "Scalable-Softmax", arXiv 2501.19399.
    first: the number of the first position. table: [max_positions] fp32.
    """

    def __init__(self, scale: float, every: float, build: Build, first: int = 1) -> None:
        super().__init__()
        if build.group.device.type == "meta":
            self.table = torch.empty(build.max_positions, dtype=torch.float32, device="meta")
            return
        steps = torch.floor((torch.arange(build.max_positions, dtype=torch.float32) + first) / every)
        self.table = (torch.log1p(steps) * scale + 1.0).to(build.group.device)

    def forward(self, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the factors of a step's tokens: [num_tokens] -> [num_tokens, 1, 1]."""
        return self.table.index_select(0, positions).view(-1, 1, 1)
