"""Weights of linear layers in eight bits, with one scale per output channel: w is about weight * scale[:, None].

A layer comes to hold them in one of two ways: `store_as` gives it empty parameters that a quantised checkpoint fills,
`quantise` makes them of the plain weight once that is loaded, and frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.fp8 import Fp8Linear
from parallel.group import Group
from parallel.int8 import Int8Linear
from parallel.linear import ParallelLinear
from parallel.methods import LinearMethod
from parallel.parameter import ShardedParameter

ROWS = 1024  # of a weight that are in memory in fp32 at a time
MEETING_TIMEOUT = 300.0  # seconds that ranks wait for each other's largest weights: they load at different speeds


@dataclass(frozen=True, slots=True)
class Format:
    """A type of weights. limit: the largest number it holds. method: multiplies by weight and scale."""

    dtype: torch.dtype
    limit: float
    method: Callable[[Tensor, Tensor], LinearMethod]


FORMATS: Mapping[str, Format] = {
    "fp8": Format(torch.float8_e4m3fn, 448.0, Fp8Linear),
    "int8": Format(torch.int8, 127.0, Int8Linear),
}


def store_as(layer: ParallelLinear, form: Format) -> None:
    """Give `layer` parameters for weights that are quantised already: `weight` and, in fp32, `weight_scale` [out]."""
    plain = layer.weight
    _hold(layer, torch.zeros(plain.shape, dtype=form.dtype, device=plain.device), form, plain)


@torch.no_grad()
def quantise(layer: ParallelLinear, form: Format) -> None:
    """Quantise the loaded weight of `layer` and free it. All ranks of its group must call alike, in one order.

    Each output channel's largest weight becomes the format's largest number; where the ranks hold slices of the
    channels it is the largest of all slices, so that the weights do not depend on the number of ranks.
    """
    plain = layer.weight
    largest = torch.cat([rows.abs().amax(dim=1).float() for rows in plain.split(ROWS)])
    if plain.axis == 1:
        largest = group_max(layer.group, largest)
    scale = scale_of(largest, form)
    _hold(layer, quantised(plain, scale, form), form, plain)
    layer.weight_scale.data.copy_(scale)
    for parameter in (layer.weight, layer.weight_scale):
        parameter.loaded_parts.update([piece.key for piece in parameter.pieces] or [""])


def scale_of(largest: Tensor, form: Format) -> Tensor:
    """Return the fp32 scales of channels by their largest absolute weights; 1 for a channel of zeros."""
    return torch.where(largest > 0, largest / form.limit, 1.0)


def quantised(weight: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Return weight [out, in] / scale [out] rounded to the format, ties to even."""
    found = torch.empty(weight.shape, dtype=form.dtype, device=weight.device)
    for first in range(0, len(weight), ROWS):
        part = slice(first, first + ROWS)
        scaled = (weight[part].float() / scale[part, None]).clamp_(-form.limit, form.limit)
        found[part] = (scaled if form.dtype.is_floating_point else scaled.round_()).to(form.dtype)
    return found


def group_max(group: Group, x: Tensor) -> Tensor:
    """Return the elementwise maximum over the group, with the patience that loading needs."""
    found = x
    for rank in range(group.size if group.size > 1 else 0):
        theirs = x.clone() if rank == group.rank else torch.empty_like(x)
        found = torch.maximum(found, group.broadcast(theirs, rank, timeout=MEETING_TIMEOUT))
    return found


def _hold(layer: ParallelLinear, weight: Tensor, form: Format, plain: ShardedParameter) -> None:
    by_row = plain.axis == 0
    scale = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
    layer.weight = ShardedParameter(weight, plain.axis, plain.pieces)
    layer.weight_scale = ShardedParameter(scale, 0 if by_row else None, plain.pieces if by_row else ())
    layer.method = form.method(layer.weight, layer.weight_scale)
