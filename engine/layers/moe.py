"""Mixture of experts: feed-forward layers of which each token passes through a few (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from engine.layers.base import Build, Layer
from parallel.linear import MergedColumnParallelLinear, RowParallelLinear


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
    ) -> None:
        super().__init__()
        group, dtype = build.group, build.dtype
        self.group = group
        self.activate = activate
        self.up = nn.ModuleList(MergedColumnParallelLinear(hidden, inner, bias, group, dtype) for _ in range(count))
        self.down = nn.ModuleList(RowParallelLinear(width, hidden, bias, group, dtype) for _ in range(count))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, whole on every rank: [num_tokens, hidden].

        x: [num_tokens, hidden]. chosen: numbers of experts, weights: of their outputs, both [num_tokens, k].
        """
        tokens, k = chosen.shape
        numbers = chosen.reshape(-1)
        order = numbers.argsort(stable=True)
        counts = self._counts(numbers)
        inputs = x.index_select(0, order // k)
        outputs = torch.empty(tokens * k, x.shape[1], dtype=x.dtype, device=x.device)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                outputs[order[first : first + count]] = self._expert(expert, inputs[first : first + count])
                first += count
        # The sum over a token's experts is in the order of `chosen`, whatever the other tokens have chosen.
        total = (outputs.view(tokens, k, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return self.group.all_reduce(total.to(x.dtype))

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
