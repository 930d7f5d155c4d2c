"""Mixture of experts: feed-forward layers of which each token passes through a few (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor, nn

from engine.kernels.base import GroupedProduct, Kernels
from engine.layers.base import Build, Layer
from engine.layers.mlp import ACTIVATIONS, MLP, Gate, GatedMLP, sigmoid
from parallel.group import SoloGroup
from parallel.linear import MergedColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel.parameter import ShardedParameter, replicated


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted.

    count, top_k: experts of a layer, and those of one token. scores: what the router's logits become, "softmax" over
    all experts, "sigmoid" of each, or "chosen": a softmax over the chosen ones alone (gpt-oss). renormalise: whether
    the weights of a token's experts sum to one; they are divided by their sum + epsilon. scale: of the weights, after
    that.
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
    epsilon: float = 1e-20
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    wide: bool = False
    bias: bool = False
    scales_input: bool = False


class RouterLinear(ReplicatedLinear):
    """The product of a router, whole on every rank; it chooses, so it is not quantised."""

    quantized = False


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
            weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.epsilon)
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
    """The experts of one layer: this rank's share of the width of each, or some of them whole (expert parallelism).

    inner: widths of what is computed of the input in one product, such as gate and up. activate: from this product,
    [num_rows, sum of this rank's share of inner], to the input of the second one, [num_rows, width of this rank].
    own: numbers of the experts that this rank holds.

    Each expert's weights are linear layers of their own, so that they are packed, quantised and multiplied as all
    others are; on a CPU a row has the same bits whatever rows are beside it. On a GPU one launch multiplies by all of
    them. scales_input: as of `Routing`.
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
        self.count = count
        self.group = build.group
        self.activate = activate
        self.whole = build.expert_parallel and build.group.size > 1
        self.firsts = first_experts(count, build.group.size) if self.whole else [0, count]
        rank = build.group.rank if self.whole else 0
        self.own = range(self.firsts[rank], self.firsts[rank + 1])
        group, dtype = SoloGroup(build.group.device) if self.whole else build.group, build.dtype
        up = {str(number): MergedColumnParallelLinear(hidden, inner, bias, group, dtype) for number in self.own}
        down = {str(number): RowParallelLinear(width, hidden, bias, group, dtype) for number in self.own}
        self.up, self.down = nn.ModuleDict(up), nn.ModuleDict(down)
        self.grouped: tuple[GroupedProduct, GroupedProduct] | None = None

    @property
    def counts_on_host(self) -> bool:
        """Whether a step waits for the device to say how many rows an expert, or a rank, gets."""
        return self.grouped is None or self.whole

    def use_kernels(self, kernels: Kernels) -> None:
        """Multiply by all experts at once, where `kernels` can; called once, after the weights are loaded."""
        ups, downs = ([self._linear(layers, number) for number in self.own] for layers in (self.up, self.down))
        if not _are_alike(ups) or not _are_alike(downs):
            return
        up, down = kernels.grouped_product(ups), kernels.grouped_product(downs)
        self.grouped = (up, down) if up is not None and down is not None else None

    @staticmethod
    def _linear(layers: nn.ModuleDict, number: int) -> ParallelLinear:
        return cast("ParallelLinear", layers[str(number)])

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, whole on every rank: [num_tokens, hidden].

        x: [num_tokens, hidden]. chosen: numbers of experts, weights: of their outputs, both [num_tokens, k].
        """
        return self.group.all_reduce(self.part(x, chosen, weights))

    def part(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of the sum that `forward` returns."""
        return (
            self._exchanged(x, chosen, weights) if self.whole else self._weighted(x, chosen, weights, self._outputs)
        )

    def _weighted(
        self, x: Tensor, chosen: Tensor, weights: Tensor, outputs_of: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the weighted sums of the outputs of each token's experts.

        outputs_of: from rows and the numbers of their experts, in order, to what these return.
        """
        tokens, k = chosen.shape
        numbers = chosen.reshape(-1)
        order = numbers.argsort(stable=True)
        inputs = x.index_select(0, order // k)
        if self.scales_input:
            inputs = (inputs * weights.reshape(-1, 1)[order]).to(x.dtype)
        outputs = torch.empty(tokens * k, x.shape[1], dtype=x.dtype, device=x.device)
        outputs[order] = outputs_of(inputs, numbers[order])
        # The sum over a token's experts is in the order of `chosen`, whatever the other tokens have chosen.
        each = outputs.view(tokens, k, x.shape[1])
        return (each if self.scales_input else each * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def _outputs(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return what this rank's experts make of rows that lie in the order of their numbers: [num_rows, hidden]."""
        if self.grouped is not None:
            own = torch.arange(self.own.start, self.own.stop, device=numbers.device)
            ends = torch.searchsorted(numbers, own, right=True)
            up, down = self.grouped
            return down.apply(self.activate(up.apply(inputs, ends)), ends, self.whole or self.group.rank == 0)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in zip(self.own, self._counts(numbers), strict=True):
            if count:
                rows = self.activate(self.up[str(expert)](inputs[first : first + count]))
                outputs[first : first + count] = cast("RowParallelLinear", self.down[str(expert)]).part(rows)
                first += count
        return outputs

    def _counts(self, numbers: Tensor) -> list[int]:
        """Return how many rows each expert of this rank gets."""
        experts = len(self.own)
        if numbers.is_meta:  # nobody knows; all alike
            return [(len(numbers) + number) // experts for number in range(experts)]
        return torch.bincount(numbers - self.own.start, minlength=experts).tolist()

    def _exchanged(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of this rank's share of the tokens, and zeros for the others.

        Tokens are whole on all ranks, and all choose alike. So each rank takes a share of them, sends their rows to
        the ranks of their experts, and adds up what comes back: as many rows are multiplied as without, whole experts
        at a time, and a token's sum has the bits that one rank alone would give it.
        """
        size, tokens = self.group.size, len(x)
        shares = [rank * tokens // size for rank in range(size + 1)]
        mine = slice(shares[self.group.rank], shares[self.group.rank + 1])
        sent, received, numbers = self._routes(chosen, shares)

        def outputs_of(inputs: Tensor, _: Tensor) -> Tensor:
            rows = self.group.all_to_all(inputs, sent, received)
            order = numbers.argsort(stable=True)
            outputs = torch.empty_like(rows)
            outputs[order] = self._outputs(rows[order], numbers[order])
            return self.group.all_to_all(outputs, received, sent)

        part = torch.zeros_like(x)
        part[mine] = self._weighted(x[mine], chosen[mine], weights[mine], outputs_of)
        return part

    def _routes(self, chosen: Tensor, shares: Sequence[int]) -> tuple[list[int], list[int], Tensor]:
        """Return the rows that go to each rank and come from each, and the experts that those are for, in order."""
        if chosen.is_meta:  # nobody knows; all alike
            rows = (shares[1] - shares[0]) * chosen.shape[1]
            return [], [], chosen.new_empty(rows)
        by_rank = [chosen[first:last].reshape(-1).sort().values for first, last in pairwise(shares)]
        bounds = torch.tensor(self.firsts[1:-1], device=chosen.device)
        ends = torch.stack([torch.searchsorted(numbers, bounds) for numbers in by_rank]).tolist()
        cuts = [[0, *end, len(numbers)] for end, numbers in zip(ends, by_rank, strict=True)]
        rank = self.group.rank
        numbers = torch.cat([each[cut[rank] : cut[rank + 1]] for each, cut in zip(by_rank, cuts, strict=True)])
        sent = [last - first for first, last in pairwise(cuts[rank])]
        return sent, [cut[rank + 1] - cut[rank] for cut in cuts], numbers


def _are_alike(layers: Sequence[ParallelLinear]) -> bool:
    """Whether the parameters of these layers say all of their weights, and are of one form."""

    def form(layer: ParallelLinear) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, parameter.dtype, parameter.shape) for name, parameter in layer.named_parameters()]

    return all(layer.method.in_parameters and form(layer) == form(layers[0]) for layer in layers)


def first_experts(count: int, size: int) -> list[int]:
    """Return the first expert of each of `size` ranks, and `count`; what is over goes to the first ranks."""
    return [rank * (count // size) + min(rank, count % size) for rank in range(size + 1)]


class MoE(Layer):
    """A router, its experts, and those that all tokens pass through.

    inner: width of an expert. shared_inner: width of the shared expert, 0 = there is none; several that are added up
    are one of their widths together. shared_gate: whether the shared one's output is weighted by a sigmoid of the
    token (Qwen2-MoE). experts: instead of those of `activation`. gated: whether these, and the shared one, are gated.
    latent: width of what experts get and return, to and from which a product leads; 0 = `hidden` (Nemotron 3).
    """

    shared: GatedMLP | MLP | None
    shared_gate: RouterLinear | None
    to_latent: ReplicatedLinear | None
    from_latent: ReplicatedLinear | None

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
        gated: bool = True,
        latent: int = 0,
    ) -> None:
        super().__init__()
        self.group = build.group
        self.router = Router(routing, hidden, build)
        self.experts = experts or Experts(
            routing.count,
            latent or hidden,
            [inner, inner] if gated else [inner],
            inner,
            Gate(activation) if gated else ACTIVATIONS[activation],
            build,
            scales_input=routing.scales_input,
        )
        self.to_latent = ReplicatedLinear(hidden, latent, False, build.group, build.dtype) if latent else None
        self.from_latent = ReplicatedLinear(latent, hidden, False, build.group, build.dtype) if latent else None
        shared = GatedMLP if gated else MLP
        self.shared = shared(hidden, shared_inner, activation, build) if shared_inner else None
        self.shared_gate = RouterLinear(hidden, 1, False, build.group, build.dtype) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        part = self.experts.part(x if self.to_latent is None else self.to_latent(x), *self.router(x))
        if self.from_latent is not None:
            part = self.from_latent(part)
        if self.shared is None:
            return self.group.all_reduce(part)
        shared = self.shared.part(x)
        if self.shared_gate is not None:
            shared = shared * sigmoid(self.shared_gate(x))
        if not self.experts.whole:
            return self.group.all_reduce(part + shared)
        # Which rank has a token's experts depends on its place in the step; the order of what is added must not.
        experts, shared = self.group.all_reduce(torch.stack((part, shared)))
        return experts + shared
