"""Weights in int8, activations as they are (W8A16): half of what bfloat16 weights take, a quarter of float32's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from parallel.methods import LinearMethod

# Rows up to which a product on a GPU is bound by reading the weight, in int8. Beyond, dequantising once costs less.
FEW_ROWS = 64


class Int8Linear(LinearMethod):
    """weight [out, in] in int8 times scale [out] in fp32, on any device: dequantised for each product.

    That saves the memory and costs time: `choose_methods` puts a product that reads int8 in its place.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = torch.empty(self.weight.shape, dtype=x.dtype, device=x.device)
        torch.mul(self.weight, self.scale[:, None], out=weight)  # in fp32, rounded once; a GPU writes nothing else
        return F.linear(x, weight, bias)


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
