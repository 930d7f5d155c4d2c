"""What the methods of quantised weights have in common, and those of eight bits with a scale for each output.

Such a layer comes to hold such weights in one of two ways: a quantised checkpoint fills them, or they are made of the
plain weight once that is loaded, which is then freed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import gcd
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.kernels.base import Kernels
from engine.quantization.spec import QuantizationSpec
from parallel.group import Group
from parallel.linear import LinearMethod, ParallelLinear
from parallel.parameter import ShardedParameter
from parallel.sharding import Piece

# Makes what multiplies by a plain weight, with the same bits for a row whatever the number of rows where it can.
Pack = Callable[[Tensor], LinearMethod]
ROWS = 1024  # of a weight that are in memory in fp32 at a time
MEETING_TIMEOUT = 300.0  # seconds that ranks wait for each other's largest weights: they load at different speeds


class QuantizedLinear(LinearMethod):
    """A weight that is held in fewer bits than the activations.

    widens: whether each product makes the weight plain first, as long as the layer's method is this one.
    """

    widens: ClassVar[bool] = False

    @abstractmethod
    def outline(self, layer: ParallelLinear) -> None:
        """Give `layer` the parameters that it has once it is loaded, if it has not got them yet."""

    @abstractmethod
    def use_kernels(self, layer: ParallelLinear, kernels: Kernels, pack: Pack) -> None:
        """Let `layer`, whose method this is, multiply by what `kernels` have for such weights, if anything.

        pack: for what is made plain. Call once, when the parameters are loaded.
        """


def shared_by(size: int, parameter: ShardedParameter, axis: int) -> int:
    """Return how many neighbours along an axis of this rank's part of a weight share a scale at least.

    size: how many do on disk. Fewer where ranks, or parts, begin or end among them.
    """
    sizes = [parameter.full_shape()[axis], parameter.shape[axis]]
    if parameter.axis == axis:
        for piece in parameter.pieces:
            sizes += [piece.full, piece.start, piece.size, piece.offset]
    return gcd(size, *sizes)


def divided(pieces: tuple[Piece, ...], by: int) -> tuple[Piece, ...]:
    """Return the pieces of what there is one of for so many."""
    return tuple(
        Piece(piece.key, piece.full // by, piece.start // by, piece.size // by, piece.offset // by)
        for piece in pieces
    )


def parts_of(weight: ShardedParameter) -> list[int]:
    """Return the outputs, over all ranks, of each part of a weight that a checkpoint holds apart."""
    parts = [weight.full_shape(piece.key)[0] for piece in weight.pieces] if weight.axis == 0 else []
    return parts or [weight.full_shape()[0]]


def scale_dtype(weights: torch.dtype) -> torch.dtype:
    """Return what scales of weights in this dtype are rounded to: the same, as checkpoints keep them.

    In float16, whose smallest numbers are coarse, small scales would lose their digits: theirs stay in fp32.
    """
    return torch.float32 if weights is torch.float16 else weights


class ChannelLinear(QuantizedLinear):
    """weight [out, in] of `dtype` times scale [out] in fp32, one for each output channel.

    limit: the largest number that `dtype` holds. stored: whether the checkpoint holds the weights so.
    """

    dtype: ClassVar[torch.dtype]
    limit: ClassVar[float]
    weight: Tensor
    scale: Tensor

    def __init__(self, spec: QuantizationSpec) -> None:
        self.stored = spec.stored
        self.loads_plain = not spec.stored

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor) -> Self:
        """Return the method of a weight that is there already."""
        made = cls(QuantizationSpec("made", "made"))
        made.hold(weight, scale)
        return made

    def hold(self, weight: Tensor, scale: Tensor) -> None:
        """Multiply by these from now on."""
        self.weight, self.scale = weight, scale

    @override
    def create(self, layer: ParallelLinear, name: str) -> None:
        if self.stored:
            self.outline(layer)

    @override
    def outline(self, layer: ParallelLinear) -> None:
        plain = layer.weight
        self._take(layer, ShardedParameter.of(plain.shape, self.dtype, plain.device, plain.axis, plain.pieces))

    @override
    @torch.no_grad()
    def load(self, layer: ParallelLinear) -> None:
        """Quantise the weight if it is plain, and free that.

        Each output channel's largest weight becomes the largest number; where the ranks hold slices of the channels
        it is the largest of all slices, so that the weights do not depend on the number of ranks.
        """
        if self.stored:
            return
        plain = layer.weight
        largest = torch.cat([rows.abs().amax(dim=1).float() for rows in plain.split(ROWS)])
        if plain.axis == 1:
            largest = group_max(layer.group, largest)
        scale = self.scale_of(largest, plain.dtype)
        self._take(layer, ShardedParameter(self.quantised(plain, scale), plain.axis, plain.pieces))
        layer.weight_scale.allocate()
        layer.weight_scale.data.copy_(scale)
        for parameter in (layer.weight, layer.weight_scale):
            parameter.mark_loaded()

    @classmethod
    def scale_of(cls, largest: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the fp32 scales of channels by their largest absolute weights; 1 for a channel of zeros.

        dtype: of the weights. A channel with NaN has NaN, so that what is computed of it shows.
        """
        scale = (largest / cls.limit).to(scale_dtype(dtype)).float()
        return torch.where(scale == 0, 1.0, scale)

    @classmethod
    def quantised(cls, weight: Tensor, scale: Tensor) -> Tensor:
        """Return weight [out, in] / scale [out] rounded to the dtype, ties to even."""
        found = torch.empty(weight.shape, dtype=cls.dtype, device=weight.device)
        for first in range(0, len(weight), ROWS):
            part = slice(first, first + ROWS)
            scaled = (weight[part].float() / scale[part, None]).clamp_(-cls.limit, cls.limit)
            found[part] = (scaled if cls.dtype.is_floating_point else scaled.round_()).to(cls.dtype)
        return found

    def _take(self, layer: ParallelLinear, weight: ShardedParameter) -> None:
        """Make `weight` the layer's, with a scale for each row, of which a layer split by columns has all."""
        by_row = weight.axis == 0
        pieces = weight.pieces if by_row else ()
        layer.weight = weight
        layer.weight_scale = ShardedParameter.of(
            weight.shape[:1], torch.float32, weight.device, 0 if by_row else None, pieces
        )
        self.hold(layer.weight, layer.weight_scale)


def group_max(group: Group, x: Tensor) -> Tensor:
    """Return the elementwise maximum over the group, with the patience that loading needs."""
    found = x
    for rank in range(group.size if group.size > 1 else 0):
        theirs = x.clone() if rank == group.rank else torch.empty_like(x)
        found = torch.maximum(found, group.broadcast(theirs, rank, timeout=MEETING_TIMEOUT))
    return found
