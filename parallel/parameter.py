"""Parameters that know how to load their own shard from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.sharding import Piece


class WeightSource(Protocol):
    """One tensor on disk, read by slices; what safetensors' `get_slice` returns fits."""

    def get_shape(self) -> Sequence[int]:
        """Return the shape of the whole tensor on disk."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part that a slice or a tuple of slices selects."""


@dataclass(frozen=True, slots=True)
class TensorSource(WeightSource):
    """A tensor in memory, of weights that are made of several on disk."""

    tensor: Tensor

    def get_shape(self) -> Sequence[int]:
        """Return the tensor's shape."""
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a tensor on disk must be: its shape over all ranks, None = any, and one of some dtypes."""

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a parameter, over all ranks, is made of tensors of a checkpoint, by the last part of their names.

    tensors: that must be there. spare: that may be missing. make: from those that are there to the parameter; raises
    `ValueError` saying what is wrong with their contents.
    """

    tensors: Mapping[str, StoredTensor]
    make: Callable[[Mapping[str, Tensor]], Tensor]
    spare: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a tensor on disk and where it goes.

    target: the place in the parameter, with the axes in the order of the disk. index: slices of step 1 of the tensor
    on disk, from its first axis on; those that are left out are whole.
    """

    target: Tensor
    index: tuple[slice, ...]


class ShardedParameter(torch.nn.Parameter):
    """A parameter that holds this rank's shard and reads exactly that from a checkpoint.

    axis: dimension that is split, None where every rank holds the whole.
    pieces: the parts along `axis`, in the order in which a fused checkpoint tensor would hold them.
    loaded_parts: keys of the parts that have been loaded.
    vacant: whether it has a shape, a dtype and a device, but no memory of its own until something is loaded.
    """

    axis: int | None
    pieces: tuple[Piece, ...]
    loaded_parts: set[str | int]
    vacant: bool

    # nn.Parameter makes its instance in __new__, so there is no __init__ to extend.
    def __new__(cls, data: Tensor, axis: int | None = None, pieces: Sequence[Piece] = ()) -> ShardedParameter:
        """Wrap `data`, this rank's shard, which is filled later by `load`."""
        parameter: ShardedParameter = super().__new__(cls, data, requires_grad=False)
        parameter.axis = axis
        parameter.pieces = tuple(pieces)
        parameter.loaded_parts = set()
        parameter.vacant = False
        return parameter

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        axis: int | None = None,
        pieces: Sequence[Piece] = (),
    ) -> ShardedParameter:
        """Return a parameter that takes no memory until something is loaded; what is not loaded then is zero."""
        full = tuple(shape)
        if device.type == "meta":  # which has no memory and no contents, but strides
            return cls(torch.empty(full, dtype=dtype, device=device), axis, pieces)
        made = cls(torch.zeros((), dtype=dtype, device=device).expand(full), axis, pieces)
        made.vacant = True
        return made

    def allocate(self) -> None:
        """Take the memory of a vacant parameter, filled with zeros."""
        if self.vacant:
            self.data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.vacant = False

    def full_shape(self, part: str | int | None = None) -> tuple[int, ...]:
        """Return the shape over all ranks of one part, None = of all parts one after another."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = sum(piece.full for piece in self._pieces_of(part))
        return tuple(shape)

    @property
    def missing(self) -> tuple[str | int, ...]:
        """Keys of the parts that nothing was loaded into yet; ("",) for a parameter of one part."""
        keys = [piece.key for piece in self.pieces] or [""]
        return tuple(key for key in keys if key not in self.loaded_parts)

    @property
    def loaded(self) -> bool:
        """Whether every part has been loaded."""
        return not self.missing

    @torch.no_grad()
    def load(self, source: WeightSource, part: str | int | None = None, transposed: bool = False) -> None:
        """Copy this rank's slice of `source` in, cast to the parameter's dtype; nothing else is read.

        Arguments and errors as of `transfers`.
        """
        for transfer in self.transfers(source, part, transposed):
            transfer.target.copy_(source[transfer.index])
        self.mark_loaded(part)

    def transfers(
        self, source: WeightSource, part: str | int | None = None, transposed: bool = False
    ) -> list[Transfer]:
        """Return what is to be copied from where, for a caller that copies in its own way; nothing is read here.

        part: key of one piece; None loads the whole, from a tensor that holds all pieces one after another.
        transposed: the tensor on disk is [in, out], as in GPT-2's Conv1D.

        Raises `ValueError` naming both shapes when the one on disk is another, `KeyError` for an unknown part.
        """
        pieces = self._pieces_of(part)
        self._check(source, part, transposed)
        self.allocate()
        if self.axis is None:
            return [Transfer(_on_disk(self.data, transposed), (slice(None),))]
        disk_axis = self.ndim - 1 - self.axis if transposed else self.axis
        found: list[Transfer] = []
        before = 0
        for piece in pieces:
            wanted = slice(before + piece.start, before + piece.start + piece.size)
            before += piece.full
            if piece.size:
                target = self.data.narrow(self.axis, piece.offset, piece.size)
                found.append(Transfer(_on_disk(target, transposed), (slice(None),) * disk_axis + (wanted,)))
        return found

    def mark_loaded(self, part: str | int | None = None) -> None:
        """Note that the transfers of `part`, None = of all parts, were made."""
        self.loaded_parts.update([piece.key for piece in self._pieces_of(part)] or [""])

    def _pieces_of(self, part: str | int | None) -> tuple[Piece, ...]:
        return self.pieces if part is None else (self._piece(part),)

    def _piece(self, part: str | int) -> Piece:
        for piece in self.pieces:
            if piece.key == part:
                return piece
        known = ", ".join(repr(piece.key) for piece in self.pieces)
        raise KeyError(f"no part {part!r} in this parameter; its parts: {known or 'none, it is whole'}")

    def _check(self, source: WeightSource, part: str | int | None, transposed: bool) -> None:
        shape, found = self.full_shape(part), tuple(source.get_shape())
        expected = shape[::-1] if transposed else shape
        if found != expected:
            raise ValueError(f"the checkpoint's tensor has shape {found}, the model wants {expected}")


def _on_disk(target: Tensor, transposed: bool) -> Tensor:
    return target.t() if transposed else target


def replicated(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> ShardedParameter:
    """Return a vacant parameter of `shape` that every rank holds whole (norms, position embeddings)."""
    return ShardedParameter.of(shape, dtype, device)
