"""Weights in fp8 (e4m3) with a scale for each output, activations as they are (W8A16)."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, LARGEST_E4M3, Kernels
from engine.quantization.block_linear import read_as_it_is
from engine.quantization.eight_bits import from_e4m3
from engine.quantization.method import ChannelLinear, Pack
from engine.quantization.widened import WidenedProduct
from parallel.linear import ParallelLinear


class Fp8WeightLinear(ChannelLinear):
    """weight [out, in] times weight_scale [out].

    Made plain for each product, on any device; `use_kernels` puts a product that reads fp8 in its place.
    """

    dtype = E4M3
    limit = LARGEST_E4M3
    widens = True

    @override
    def hold(self, weight: Tensor, scale: Tensor) -> None:
        super().hold(weight, scale)
        self._product = WidenedProduct(weight.shape[0], weight.shape[1])

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        self._product = WidenedProduct(layer.weight.shape[0], layer.weight.shape[1], pack)
        read_as_it_is(layer, kernels, layer.weight_scale[:, None], self)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        def plain(first: int, last: int) -> Tensor:
            return (from_e4m3(self.weight[first:last]) * self.scale[first:last, None]).to(x.dtype)

        return self._product.apply(x, bias, plain)

    @override
    def describe(self) -> str:
        return "Fp8WeightLinear {}x{}".format(*self.weight.shape)
