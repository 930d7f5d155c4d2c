"""Weights in int8, activations as they are (W8A16): half of what bfloat16 weights take, a quarter of float32's."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import Kernels, dequantised_product
from engine.quantization.eight_bits import check_sizes, eight_bit_weight, gptq_scales
from engine.quantization.method import ChannelLinear, Pack
from engine.quantization.spec import QuantizationSpec
from parallel.linear import LinearMethod, ParallelLinear
from parallel.parameter import Recipe


class Int8Linear(ChannelLinear):
    """Multiplies on any device, by a weight that is dequantised for each product.

    That saves the memory and costs time: `use_kernels` puts a product that reads int8 in its place.
    """

    dtype = torch.int8
    limit = 127.0

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec)
        self._spec, self._packed = spec, spec.packed
        self.stored_names = {"weight": "weight_packed"} if spec.packed else {}

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        """Raises `CheckpointError` for sizes that are not stored so."""
        check_sizes(self._spec, name, layer.weight)
        super().create(layer, name)

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        if not self._spec.is_gptq or parameter not in ("weight", "weight_scale"):
            return None
        if parameter == "weight":
            return eight_bit_weight(self._spec, *shape)
        scales = gptq_scales(self._spec, shape[0], 1)
        return Recipe(scales.tensors, lambda read: scales.make(read)[:, 0])

    @override
    def load(self, layer: ParallelLinear) -> None:
        super().load(layer)
        if self._packed:  # numbers from -128 on are stored counted from 0
            layer.weight.data.view(torch.uint8).bitwise_xor_(128)

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        weight, scale = layer.weight, layer.weight_scale
        faster = kernels.int8_linear(weight, scale)
        if faster is None and TorchInt8Linear.supports(weight):
            faster = TorchInt8Linear(weight, scale)
        if faster is not None:
            layer.method = faster
            if weight.device.type == "cpu":
                layer.release_weight()

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return dequantised_product(x, self.weight, self.scale, bias)


class TorchInt8Linear(LinearMethod):
    """Torch's own product with int8 weights, for CPUs that the engine's compiled ones are not written for.

    A row has the same bits whatever the number of rows.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self._weight = weight.detach().contiguous()  # a tensor of its own: the layer's is released
        self._scale = scale
        # Torch takes scales of the result's dtype, and a scale in bfloat16 would bend a whole channel.
        self._ones = torch.ones_like(scale, dtype=torch.bfloat16)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether torch multiplies by int8 `weight` on this machine; of other sizes it reads past the end."""
        fits = weight.device.type == "cpu" and not weight.shape[0] % 64 and not weight.shape[1] % 64
        return fits and hasattr(torch, "_weight_int8pack_mm")

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype is torch.bfloat16:
            out = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._ones).float().mul_(self._scale)
        else:
            out = torch._weight_int8pack_mm(x.float().contiguous(), self._weight, self._scale)
        return (out if bias is None else out.add_(bias)).to(x.dtype)
