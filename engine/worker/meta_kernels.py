"""What a model computes with while it runs in shapes alone, on torch's device `meta`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from engine.attention.base import LayerCache, PagedAttention, StepTensors
from engine.kernels.base import E4M3, GroupedProduct, TorchKernels
from parallel.linear import ParallelLinear


class BlueprintAttention(PagedAttention):
    """Attention that makes its result's tensor and nothing else, as kernels without scratch memory do."""

    name = "blueprint"

    @override
    def prepare(self, step: StepTensors) -> NoReturn:
        raise RuntimeError("a blueprint attends to no step")

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: object,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return query.new_empty(*query.shape[:2], self.spec.value_dim)


class MetaKernels(TorchKernels):
    """Torch's operations, but where a GPU's kernel makes less on the way."""

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    @override
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(residual)

    @override
    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)

    @override
    def grouped_product(self, layers: Sequence[ParallelLinear]) -> GroupedProduct | None:
        return MetaGroupedProduct(len(layers[0].weight))


class MetaGroupedProduct(GroupedProduct):
    """What `outs` outputs of each row take."""

    def __init__(self, outs: int) -> None:
        self._outs = outs

    @override
    def apply(self, x: Tensor, ends: Tensor, biased: bool = True) -> Tensor:
        return x.new_empty(len(x), self._outs)
