"""Weights and activations in fp8 (W8A8, e4m3): half the bytes of bfloat16, and the matrix units' double rate.

A weight has a scale per output channel, an activation one per token, found as it comes: (x_q w_q^T) * s_x * s_w.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from engine.errors import ConfigError
from engine.kernels.base import E4M3, LARGEST_E4M3, Kernels, quantise_rows
from engine.quantization.method import ChannelLinear, Pack
from parallel.linear import ParallelLinear

MULTIPLE = 16  # sizes that the matrix units take
ROW_WISE = (9, 0)  # compute capability from which cuBLAS and CUTLASS scale by row and column themselves
LEAST_CAPABILITY = (8, 9)  # the first with matrix units for fp8: Ada; then Hopper


def exact_product(rows: Tensor, row_scales: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `_scaled_mm` does, in fp32 on any device: the reference, since its products are exact there."""
    return (F.linear(rows.float(), weight.float()) * row_scales * scale).to(dtype)


class Fp8Linear(ChannelLinear):
    """Multiplies by the matrix units of a GPU.

    quantise_rows: makes e4m3 rows of activations; torch's operations unless a kernel is given. Off a GPU the product
    is `exact_product`, for tests and for measuring accuracy: an engine refuses fp8 there.
    """

    dtype = E4M3
    limit = LARGEST_E4M3

    @override
    def hold(self, weight: Tensor, scale: Tensor) -> None:
        super().hold(weight, scale)
        self.quantise_rows = quantise_rows
        self._one = torch.ones((), dtype=torch.float32, device=weight.device)
        self._by_row = weight.is_meta or (
            weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= ROW_WISE
        )

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        """Raises `ConfigError` for a size that the matrix units do not take."""
        rows, columns = layer.weight.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            raise ConfigError(
                f"quantization=fp8: {name} is [{rows}, {columns}] on each rank, and fp8 products want multiples of "
                f"{MULTIPLE}; use another tensor_parallel_size, or the unquantised checkpoint with quantization=int8",
                "quantization",
            )
        super().create(layer, name)

    @override
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        self.quantise_rows = kernels.quantise_rows

    @override
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self.weight))
        rows, scales = self.quantise_rows(x)
        if self.weight.is_cuda or self.weight.is_meta:
            out = self._multiply(rows, scales, x.dtype)
        else:
            out = exact_product(rows, scales, self.weight, self.scale, x.dtype)
        return out if bias is None else out.add_(bias)

    def _multiply(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        columns = self.weight.t()
        # Scaling by row exists for bfloat16 results alone; elsewhere fp32 sums are scaled afterwards.
        if self._by_row and dtype is torch.bfloat16:
            return torch._scaled_mm(
                rows, columns, scale_a=scales, scale_b=self.scale[None], out_dtype=dtype, use_fast_accum=True
            )
        sums = torch._scaled_mm(rows, columns, scale_a=self._one, scale_b=self._one, out_dtype=torch.float32)
        return sums.mul_(scales).mul_(self.scale).to(dtype)
