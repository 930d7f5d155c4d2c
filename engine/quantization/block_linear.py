"""Weights in eight bits with a scale for each block of outputs and inputs, activations as they are (W8A16).

So are fp8 by blocks, as DeepSeek and Qwen ship it, and int8 by groups of inputs, blocks of one output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import E4M3, Kernels
from engine.quantization.eight_bits import block_scales, check_sizes, eight_bit_weight, scaled_by_blocks
from engine.quantization.layout import in_sixteen_bits
from engine.quantization.method import Pack, QuantizedLinear, divided, shared_by
from engine.quantization.spec import QuantizationSpec
from engine.quantization.widened import FewRowsLinear, WidenedProduct
from parallel.linear import ParallelLinear
from parallel.parameter import Recipe, ShardedParameter


class BlockLinear(QuantizedLinear):
    """weight [out, in] in e4m3 or int8 times weight_scale [out / rows, in / columns], one for each block.

    A block here is a part of one on disk where ranks, or parts of a merged weight, begin or end within that. Made
    plain for each product, on any device; `use_kernels` puts a product that reads eight bits in its place.
    """

    widens = True

    def __init__(self, spec: QuantizationSpec) -> None:
        if spec.block is None:
            raise ValueError("weights by blocks need the size of a block")
        self._spec, self._block = spec, spec.block
        self._shares = (0, 0)  # (0, 0) = `create` has not been called

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        """Raises `CheckpointError` for sizes that are not stored so."""
        check_sizes(self._spec, name, layer.weight)
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
        dtype = E4M3 if self._spec.weights == "fp8" else torch.int8
        layer.weight = ShardedParameter.of((outs, ins), dtype, plain.device, plain.axis, plain.pieces)
        layer.weight_scale = ShardedParameter.of(
            (outs // rows, ins // columns), self._scales_dtype(plain), plain.device, plain.axis, pieces
        )
        self._hold(layer)

    def _scales_dtype(self, plain: ShardedParameter) -> torch.dtype:
        """Return what scales are loaded in; where nothing is, as for a plan, the most that they are held in later."""
        narrows = plain.device.type == "meta" and self._spec.weights == "int8" and plain.dtype is not torch.float32
        return torch.bfloat16 if narrows else torch.float32

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        if parameter == "weight":
            return eight_bit_weight(self._spec, *shape) if self._spec.packed or self._spec.is_gptq else None
        if parameter != "weight_scale":
            return None
        outs, ins = shape[0] * self._shares[0], shape[1] * self._shares[1]
        return block_scales(self._spec, outs, ins, self._shares)

    @override
    def load(self, layer: ParallelLinear) -> None:
        if self._spec.weights == "int8":
            layer.weight_scale.data = in_sixteen_bits(layer.weight_scale.data)
        self._hold(layer)

    def _hold(self, layer: ParallelLinear) -> None:
        self._weight, self._scale = layer.weight, layer.weight_scale
        self._product = WidenedProduct(layer.weight.shape[0], layer.weight.shape[1])

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        self._product = WidenedProduct(layer.weight.shape[0], layer.weight.shape[1], pack)
        read_as_it_is(layer, kernels, layer.weight_scale, self)

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
        return "{} BlockLinear {}x{} by {}x{}".format(self._spec.weights, *self._weight.shape, *self._shares)


def read_as_it_is(layer: ParallelLinear, kernels: Kernels, scale: Tensor, method: QuantizedLinear) -> None:
    """Let `kernels` multiply by a weight in eight bits, if they can. scale: of each block. method: the layer's."""
    faster = kernels.block_linear(layer.weight, scale)
    if faster is None:
        return
    if layer.weight.device.type == "cpu":
        layer.method = faster
        layer.release_weight(layer.weight_scale)
    else:
        layer.method = FewRowsLinear(faster, method)
