"""Weights in fp8 (e4m3), activations as they are (W8A16): with a scale per output, or per block of a weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, LARGEST_E4M3, Kernels
from engine.quantization.layout import EIGHT_BIT_SCALES, checked, of_outputs, read_as
from engine.quantization.method import ChannelLinear, Pack, QuantizedLinear, divided, shared_by
from engine.quantization.spec import QuantizationSpec
from engine.quantization.widened import FewRowsLinear, WidenedProduct
from parallel.linear import ParallelLinear
from parallel.parameter import Recipe, ShardedParameter


def from_e4m3(weight: Tensor) -> Tensor:
    """Return a weight in fp32, a copy."""
    if weight.device.type != "cpu":
        return weight.float()
    # On CPUs torch converts one number at a time; to look them up is six times as fast.
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    return every.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)


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
        _read_as_it_is(layer, kernels, layer.weight_scale[:, None], self)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        def plain(first: int, last: int) -> Tensor:
            return (from_e4m3(self.weight[first:last]) * self.scale[first:last, None]).to(x.dtype)

        return self._product.apply(x, bias, plain)

    @override
    def describe(self) -> str:
        return "Fp8WeightLinear {}x{}".format(*self.weight.shape)


class Fp8BlockLinear(QuantizedLinear):
    """weight [out, in] times weight_scale [out / rows, in / columns], one for each block of rows x columns.

    A block here is a part of one on disk where ranks, or parts of a merged weight, begin or end within that. Made
    plain for each product, on any device; `use_kernels` puts a product that reads fp8 in its place.
    """

    widens = True

    def __init__(self, spec: QuantizationSpec) -> None:
        if spec.block is None:
            raise ValueError("fp8 by blocks needs the size of a block")
        self._spec, self._block = spec, spec.block
        self._shares = (0, 0)  # (0, 0) = `create` has not been called

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        self.outline(layer)

    @override
    def outline(self, layer: ParallelLinear) -> None:
        if self._shares != (0, 0):
            return
        plain = layer.weight
        # Rows that change places take their scales along.
        rows = 1 if layer.row_order is not None else shared_by(self._block[0], plain, 0)
        columns = shared_by(self._block[1], plain, 1)
        self._shares = rows, columns
        outs, ins = plain.shape
        pieces = plain.pieces if plain.axis is None else divided(plain.pieces, self._shares[plain.axis])
        layer.weight = ShardedParameter.of((outs, ins), E4M3, plain.device, plain.axis, plain.pieces)
        layer.weight_scale = ShardedParameter.of(
            (outs // rows, ins // columns), torch.float32, plain.device, plain.axis, pieces
        )
        self._hold(layer)

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        if parameter != "weight_scale":
            return None
        outs, ins = shape[0] * self._shares[0], shape[1] * self._shares[1]
        return block_scales(self._spec, outs, ins, self._shares)

    @override
    def load(self, layer: ParallelLinear) -> None:
        self._hold(layer)

    def _hold(self, layer: ParallelLinear) -> None:
        self._weight, self._scale = layer.weight, layer.weight_scale
        self._product = WidenedProduct(layer.weight.shape[0], layer.weight.shape[1])

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        self._product = WidenedProduct(layer.weight.shape[0], layer.weight.shape[1], pack)
        _read_as_it_is(layer, kernels, layer.weight_scale, self)

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = self._shares[0]

        def plain(first: int, last: int) -> Tensor:
            scales = self._scale[first // rows : -(-last // rows)]
            outs = first - first // rows * rows
            part = slice(first // rows * rows, -(-last // rows) * rows)
            return scaled_by_blocks(self._weight[part], scales, self._shares)[outs : outs + last - first].to(x.dtype)

        return self._product.apply(x, bias, plain)

    @override
    def describe(self) -> str:
        return "Fp8BlockLinear {}x{} by {}x{}".format(*self._weight.shape, *self._shares)


def _read_as_it_is(layer: ParallelLinear, kernels: Kernels, scale: Tensor, method: QuantizedLinear) -> None:
    """Let `kernels` multiply by a weight in fp8, if they can. scale: one for each block. method: the layer's."""
    faster = kernels.fp8_linear(layer.weight, scale)
    if faster is None:
        return
    if layer.weight.device.type == "cpu":
        layer.method = faster
        layer.release_weight(layer.weight_scale)
    else:
        layer.method = FewRowsLinear(faster, method)


def block_scales(spec: QuantizationSpec, outs: int, ins: int, shares: tuple[int, int]) -> Recipe:
    """Return how the scales of a weight [outs, ins] are made, one for each block of the size `shares`."""
    rows, columns = spec.block or (outs, ins)
    tensors = read_as(spec.scale_name, (-(-outs // rows), -(-ins // columns)), EIGHT_BIT_SCALES)

    def make(read: Mapping[str, Tensor]) -> Tensor:
        scales = checked(read[spec.scale_name], spec.scale_name)
        finer = scales.repeat_interleave(rows // shares[0], 0).repeat_interleave(columns // shares[1], 1)
        return finer[: outs // shares[0], : ins // shares[1]]

    return Recipe(tensors, make)


def scaled_by_blocks(weight: Tensor, scale: Tensor, shares: tuple[int, int]) -> Tensor:
    """Return weight [out, in] times the scales of its blocks [out / rows, in / columns], in fp32."""
    rows, columns = shares
    blocks = from_e4m3(weight).view(len(scale), rows, scale.shape[1], columns)
    return blocks.mul_(scale[:, None, :, None]).view(weight.shape)


def plain_eight_bits(spec: QuantizationSpec, outs: int, ins: int, dtype: torch.dtype) -> Recipe:
    """Return how a plain weight [out, in] is made of one in fp8 or int8."""
    if spec.block is not None:
        scales = block_scales(spec, outs, ins, (1, 1))
        weight = read_as("weight", (outs, ins), (E4M3,))
        return Recipe(
            {**weight, **scales.tensors}, lambda read: (from_e4m3(read["weight"]) * scales.make(read)).to(dtype)
        )
    if spec.packed:
        weight = read_as("weight_packed", (outs, -(-ins // 4)), (torch.int32,))
    else:
        weight = read_as("weight", (outs, ins), (E4M3,) if spec.weights == "fp8" else (torch.int8,))

    def make(read: Mapping[str, Tensor]) -> Tensor:
        scale = of_outputs(read[spec.scale_name], outs, spec.scale_name)
        if spec.packed:  # counted from -128
            plain = read["weight_packed"].view(torch.uint8)[:, :ins].float().sub_(128)
        else:
            plain = read["weight"].float()
        return plain.mul_(scale.view(-1, 1)).to(dtype)

    return Recipe(weight | read_as(spec.scale_name, None, EIGHT_BIT_SCALES), make)
