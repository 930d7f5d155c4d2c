"""Weights in four bits that are made of plain ones as these are loaded, by rounding to the nearest.

The number that is the largest of its group without its sign becomes -8 times the scale, which may be negative, and no
number is cut off: the errors' squares are a seventh less than with the largest at 7.5 steps, and one pass is enough
(as in Q4_0 of llama.cpp). Scales are rounded to the model's dtype (`scale_dtype`) before codes are made, so that a
checkpoint that keeps them so, as `squadron quantize` writes it, holds the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import ConfigError
from engine.quantization.four_bits import FourBitLinear, layout_of
from engine.quantization.layout import MIDDLE, halves
from engine.quantization.method import ROWS, scale_dtype, shared_by
from parallel.linear import ParallelLinear
from parallel.parameter import Recipe

FIELD = "quantization_group_size"
SIZES = (256, 128, 64, 32, 16, 8)  # that are proposed


@torch.no_grad()
def quantised_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [out, in / 2] uint8, two in each, and scales [out, in / group] of `scale_dtype`.

    w = (code - 8) * scale for a weight [out, in], whose inputs are a multiple of `group`.
    """
    outs, ins = weight.shape
    codes = torch.empty(outs, ins // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outs, ins // group, dtype=scale_dtype(weight.dtype), device=weight.device)
    for first in range(0, outs, ROWS):
        part = slice(first, first + ROWS)
        grouped = weight[part].to(torch.float32, copy=True).unflatten(1, (-1, group))
        low, high = grouped.aminmax(dim=-1)
        rounded = (torch.where(-low >= high, low, high) / -MIDDLE).to(scales.dtype)
        scales[part] = torch.where(rounded == 0, 1.0, rounded)  # a group of zeros, or of numbers next to none
        steps = grouped.div_(scales[part].float().unsqueeze(-1)).round_().clamp_(-MIDDLE, MIDDLE - 1)
        codes[part] = halves(steps.add_(MIDDLE).flatten(1).to(torch.uint8))
    return codes, scales


def why_not(ins: int, group: int) -> str | None:
    """Return why no weight of so many inputs has groups of this size, and what works; None where it can."""
    if ins % group == 0:
        return None
    works = next((size for size in SIZES if ins % size == 0 and size < group), None)
    instead = "use --quantization int8" if works is None else f"use {FIELD}={works}"
    return f"{ins} inputs are no multiple of {FIELD}={group}; {instead}"


class MadeInt4Linear(FourBitLinear):
    """Takes the plain weight and, once that is loaded, holds it in four bits."""

    loads_plain = True

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        """Raises `ConfigError` for inputs, in all or on a rank, that are no multiple of a group."""
        plain, group = layer.weight, self._spec.group
        self._layout = layout_of(self._spec, plain.full_shape()[1])
        self._group = shared_by(group, plain, 1)
        if self._group < group:
            on_each = f" on each of {layer.group.size} ranks" if plain.shape[1] < plain.full_shape()[1] else ""
            raise ConfigError(f"quantization=int4: {name}{on_each}: {why_not(plain.shape[1], group)}", FIELD)

    @override
    def recipe(self, parameter: str, shape: tuple[int, ...]) -> Recipe | None:
        """Nothing is made of others while the weight is plain."""
        return super().recipe(parameter, shape) if self._outs else None

    @override
    def load(self, layer: ParallelLinear) -> None:
        plain = layer.weight
        codes, scales = quantised_int4(plain, self._group)
        self.outline(layer)
        for parameter, made in ((layer.weight, codes), (layer.weight_scale, scales.float())):
            parameter.data, parameter.vacant = made, False
        layer.weight_zero.allocate()
        layer.weight_zero.data.fill_(MIDDLE)
        for parameter in (layer.weight, layer.weight_scale, layer.weight_zero):
            parameter.mark_loaded()
        super().load(layer)
