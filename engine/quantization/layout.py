"""How checkpoints hold weights in four bits by groups, and how the one form is made of each: `FourBits`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from engine.kernels.base import FourBits
from parallel.parameter import Recipe, StoredTensor

PER_WORD = 8  # codes of 4 bits in an int32
MIDDLE = 8  # the zero of a symmetric weight
INT32 = (torch.int32,)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
EIGHT_BIT_SCALES = (*SCALES, torch.float8_e8m0fnu)  # of weights in eight bits

Tensors = Mapping[str, Tensor]


class Layout(ABC):
    """Which tensors hold a layer's weight, and what is to be done with each.

    group: inputs that share a scale. reordered: whether these are not adjacent; then codes, scales and zeros are
    those of the inputs in the order that `order` returns. outputs_in_words: whether eight outputs lie in one int32.
    floats: whether codes are numbers of E2M1, and there are no zeros. scale_dtype: what scales are held in.
    has_whole: whether a tensor has one scale besides.
    """

    outputs_in_words: ClassVar[bool] = False
    floats: ClassVar[bool] = False
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    has_whole: ClassVar[bool] = False

    def __init__(self, group: int, *, reordered: bool = False) -> None:
        self.group = group
        self.reordered = reordered

    def why_not(self, outs: int, ins: int) -> str | None:
        """Return why no weight of this size is held so, None where one can be."""
        if ins % PER_WORD and not self.floats:
            return f"{ins} inputs are no multiple of {PER_WORD}, which lie in one int32"
        if ins % self.group:
            return f"its {ins} inputs are no multiple of group_size = {self.group}"
        many = self.outputs_in_words and outs % PER_WORD
        return f"{outs} outputs are no multiple of {PER_WORD}, which lie in one int32" if many else None

    @abstractmethod
    def codes(self, outs: int, ins: int) -> Recipe:
        """Return how the codes are made: [outs, ins / 2]."""

    def scales(self, outs: int, ins: int) -> Recipe:
        """Return how the scales are made: [outs, groups]. Usually they are `scales` [groups, outs] on disk."""
        tensors = read_as("scales", (ins // self.group, outs), SCALES)
        return Recipe(tensors, lambda read: checked(read["scales"], "scales").t())

    def zeros(self, outs: int, ins: int) -> Recipe:
        """Return how the zeros are made: [outs, groups]. All are 8, unless a layout says otherwise."""
        return Recipe({}, lambda _: torch.full((outs, ins // self.group), MIDDLE, dtype=torch.uint8))

    def whole(self, outs: int) -> Recipe:
        """Return how the scale of a whole tensor is made, for each output: [outs]."""
        return Recipe({}, lambda _: torch.ones(outs))

    def order(self, ins: int) -> Recipe:
        """Return how the order of the inputs is made: [1, ins] int64."""
        return Recipe({}, lambda _: torch.arange(ins)[None])


def unpacked(words: Tensor, axis: int) -> Tensor:
    """Return the codes in int32, the first in the lowest bits: uint8, 8 times as long along `axis`."""
    found = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))  # bytes of a word, lowest first
    codes = torch.stack((found & 0xF, found >> 4), dim=-1).flatten(-2)  # [..., words, 8]
    if axis == 1:
        return codes.flatten(-2)
    return codes.permute(0, 2, 1).flatten(0, 1)


def halves(codes: Tensor) -> Tensor:
    """Return codes [out, in] two in a byte, that of the even input in the low half: [out, in / 2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def in_order_of_groups(g_idx: Tensor, group: int) -> Tensor:
    """Return the inputs by their groups, in their own order within each: [in] int64.

    g_idx: the group of each input. Raises `ValueError` where some group has not `group` inputs.
    """
    counts = torch.bincount(g_idx.long().clamp_min(0), minlength=len(g_idx) // group)
    if g_idx.min() < 0 or len(counts) != len(g_idx) // group or not bool((counts == group).all()):
        raise ValueError(f"g_idx has no {group} inputs in each of {len(g_idx) // group} groups")
    return g_idx.argsort(stable=True)


def checked(scales: Tensor, name: str) -> Tensor:
    """Return scales in fp32. Raises `ValueError` where one is no number."""
    wide = scales.float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(f"{name} holds a scale that is no finite number")
    return wide


def of_outputs(scales: Tensor, outs: int, name: str) -> Tensor:
    """Return the scale of each output, or the one of all, in fp32: [outs] or [1].

    Raises `ValueError` for another number of them, such as those of blocks, and where one is no number.
    """
    sizes = [size for size in scales.shape if size != 1]
    if sizes not in ([], [outs]):
        raise ValueError(f"{name} has shape {list(scales.shape)}, and one for each of {outs} rows or one is wanted")
    return checked(scales, name).flatten()


def in_sixteen_bits(scale: Tensor) -> Tensor:
    """Return scales in bfloat16 or float16, as most are on disk, where one of these holds all of them as they are.

    scale: in fp32; scales in fewer bits are returned as they are.
    """
    narrow = (scale.to(dtype) for dtype in (torch.bfloat16, torch.float16) if scale.dtype is torch.float32)
    return next((each for each in narrow if torch.equal(each.float(), scale)), scale)


def read_as(name: str, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]) -> dict[str, StoredTensor]:
    """Return what one tensor must be, by its name. shape: None = any."""
    return {name: StoredTensor(shape, dtypes)}


def from_e2m1(codes: Tensor) -> Tensor:
    """Return the numbers of codes of 0 to 15 in fp32: read as those of float16, they have another unit.

    Nothing is copied from the host, as a CUDA graph that is recorded wants it.
    """
    wide = codes.to(torch.int16)
    return ((wide & 8) << 12 | (wide & 7) << 9).view(torch.float16).float().mul_(16384.0)


@torch.no_grad()
def dequantised(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """Return the plain weight [out, in], each rounded once from fp32."""
    outs, groups = weight.scale.shape
    both = torch.stack((weight.codes & 0xF, weight.codes >> 4), dim=-1).view(outs, groups, -1)
    zero = weight.zero
    plain = from_e2m1(both) if zero is None else both.to(torch.float32).sub_(zero.unsqueeze(-1))
    plain = plain.mul_(weight.scale_in_fp32().unsqueeze(-1)).view(outs, -1)
    return (plain if weight.whole is None else plain.mul_(weight.whole[:, None])).to(dtype)
