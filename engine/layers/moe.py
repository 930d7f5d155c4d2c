"""Mixture of experts: feed-forward layers of which each token passes through a few (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from engine.layers.base import Build, Layer
from engine.layers.mlp import Gate, GatedMLP
from parallel.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel.parameter import ShardedParameter, replicated


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted.

    count, top_k: experts of a layer, and those of one token. scores: what the router's logits become, "softmax" over
    all experts, "sigmoid" of each, or "chosen": a softmax over the chosen ones alone (gpt-oss). renormalise: whether
    the weights of a token's experts sum to one. scale: of the weights, after that.
    correction: whether a learned bias is added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437).
    groups, kept_groups: experts lie in so many groups of one size, and are chosen of the best ones; 1 = not.
    group_best: how many of its experts' scores a group is ranked by: 1 in DeepSeek-V2, 2 in V3.
    wide: whether logits are computed in fp32 whatever the model's dtype is. bias: whether the router has one.
    scales_input: whether weights multiply what an expert gets, not what it returns (Llama 4).
    """

    count: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    wide: bool = False
    bias: bool = False
    scales_input: bool = False


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in x's dtype, the same bits for a number wherever it lies.

    Torch's own in fp32 rounds by the place in the tensor; in fp64 that is lost in the rounding to fp32.
    """
    return x.double().sigmoid().to(x.dtype)


class RouterLinear(ReplicatedLinear):
    """The product of a router, whole on every rank; it chooses, so it is not quantised."""

    quantized: ClassVar[bool] = False


class Router(Layer):
    """Chooses each token's experts, on every rank alike."""

    correction: ShardedParameter | None

    def __init__(self, routing: Routing, hidden: int, build: Build) -> None:
        super().__init__()
        dtype = torch.float32 if routing.wide else build.dtype
        self.routing = routing
        self.linear = RouterLinear(hidden, routing.count, routing.bias, build.group, dtype)
        self.dtype = dtype
        device = build.group.device
        self.correction = replicated((routing.count,), torch.float32, device) if routing.correction else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of each token's experts and their weights in fp32, both [num_tokens, top_k]."""
        routing = self.routing
        logits = self.linear(x.to(self.dtype)).float()
        if routing.scores == "chosen":
            best = logits.topk(routing.top_k, dim=-1)
            return best.indices, best.values.softmax(dim=-1)
        scores = sigmoid(logits) if routing.scores == "sigmoid" else logits.softmax(dim=-1)
        ranked = scores if self.correction is None else scores + self.correction
        chosen = self._of_best_groups(ranked).topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if routing.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights if routing.scale == 1.0 else weights * routing.scale

    def _of_best_groups(self, ranked: Tensor) -> Tensor:
        """Return the scores, those of experts that are in no kept group as -inf: [num_tokens, count]."""
        routing = self.routing
        if routing.kept_groups == routing.groups:
            return ranked
        grouped = ranked.view(len(ranked), routing.groups, -1)
        best = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        kept = best.topk(routing.kept_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(Layer):
    """The experts of one layer; this rank's share of the width of each.

    inner: widths of what is computed of the input in one product, such as gate and up. activate: from this product,
    [num_rows, sum of this rank's share of inner], to the input of the second one, [num_rows, width of this rank].

    Each expert's weights are linear layers of their own, so that they are packed, quantised and multiplied as all
    others are; on a CPU a row has the same bits whatever rows are beside it.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: Sequence[int],
        width: int,
        activate: Callable[[Tensor], Tensor],
        build: Build,
        *,
        bias: bool = False,
        scales_input: bool = False,
    ) -> None:
        super().__init__()
        self.scales_input = scales_input
        group, dtype = build.group, build.dtype
        self.group = group
        self.activate = activate
        self.up = nn.ModuleList(MergedColumnParallelLinear(hidden, inner, bias, group, dtype) for _ in range(count))
        self.down = nn.ModuleList(RowParallelLinear(width, hidden, bias, group, dtype) for _ in range(count))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, whole on every rank: [num_tokens, hidden].

        x: [num_tokens, hidden]. chosen: numbers of experts, weights: of their outputs, both [num_tokens, k].
        """
        return self.group.all_reduce(self.part(x, chosen, weights))

    def part(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of the sum that `forward` returns."""
        tokens, k = chosen.shape
        numbers = chosen.reshape(-1)
        order = numbers.argsort(stable=True)
        inputs = x.index_select(0, order // k)
        if self.scales_input:
            inputs = (inputs * weights.reshape(-1, 1)[order]).to(x.dtype)
        outputs = torch.empty(tokens * k, x.shape[1], dtype=x.dtype, device=x.device)
        first = 0
        for expert, count in enumerate(self._counts(numbers)):
            if count:
                outputs[order[first : first + count]] = self._expert(expert, inputs[first : first + count])
                first += count
        # The sum over a token's experts is in the order of `chosen`, whatever the other tokens have chosen.
        each = outputs.view(tokens, k, -1)
        return (each if self.scales_input else each * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def _counts(self, numbers: Tensor) -> list[int]:
        """Return how many rows each expert gets."""
        experts = len(self.up)
        if numbers.is_meta:  # nobody knows; all alike
            return [(len(numbers) + number) // experts for number in range(experts)]
        return torch.bincount(numbers, minlength=experts).tolist()

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        """Return this rank's part of the sum that one expert's output is: [num_rows, hidden]."""
        down = cast("RowParallelLinear", self.down[expert])
        return down.part(self.activate(self.up[expert](rows)))


class MoE(Layer):
    """A router, its experts, and those that all tokens pass through.

    inner: width of an expert. shared_inner: width of the shared expert, 0 = there is none; several that are added up
    are one of their widths together. shared_gate: whether the shared one's output is weighted by a sigmoid of the
    token (Qwen2-MoE). experts: instead of gated ones of `activation`.
    """

    shared: GatedMLP | None
    shared_gate: RouterLinear | None

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str,
        routing: Routing,
        build: Build,
        *,
        shared_inner: int = 0,
        shared_gate: bool = False,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.group = build.group
        self.router = Router(routing, hidden, build)
        self.experts = experts or Experts(
            routing.count,
            hidden,
            [inner, inner],
            inner,
            Gate(activation),
            build,
            scales_input=routing.scales_input,
        )
        self.shared = GatedMLP(hidden, shared_inner, activation, build) if shared_inner else None
        self.shared_gate = RouterLinear(hidden, 1, False, build.group, build.dtype) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        part = self.experts.part(x, *self.router(x))
        if self.shared is not None:
            shared = self.shared.part(x)
            if self.shared_gate is not None:
                shared = shared * sigmoid(self.shared_gate(x))
            part = part + shared
        return self.group.all_reduce(part)
