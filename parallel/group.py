"""Tensor-parallel groups: who the ranks are and how they combine tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override


class Group(ABC):
    """The ranks that hold one model together. Used by one thread.

    All ranks must call the same collectives in the same order with tensors of the same shape and dtype. A collective
    that a peer misses raises `ChannelTimeout`, one whose peer died `ChannelError`; the group is unusable afterwards.
    """

    rank: int
    size: int
    device: torch.device
    sums_in_order: bool = False  # whether a sum's bits depend on nothing but what is summed, not on its company

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place and return it."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors joined along `dim`, in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        """Overwrite `x` in place with rank `src`'s and return it.

        timeout: seconds for this one instead of the group's own limit (infinity to wait as long as the peers live);
        where collectives are queued on a device, one with a limit of its own is waited for.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank is here."""

    @abstractmethod
    def close(self) -> None:
        """Free sockets and communicators. Can be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SoloGroup(Group):
    """A group of one: every collective returns its argument."""

    sums_in_order = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = 0
        self.size = 1
        self.device = torch.device(device)

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return x

    @override
    def barrier(self) -> None:
        return

    @override
    def close(self) -> None:
        return


def require_contiguous(x: Tensor) -> None:
    """Raise `ValueError` for a tensor that a collective cannot overwrite in place."""
    if not x.is_contiguous():
        raise ValueError(f"an in-place collective needs a contiguous tensor, not strides {x.stride()}")
