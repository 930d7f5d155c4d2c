"""Tensor-parallel groups: who the ranks are and how they combine tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def transfer(self, x: Tensor, src: int, dst: int) -> Tensor:
        """Send `x` of rank `src` to rank `dst`, which receives it in place of its own `x`; return `x`.

        All ranks call it with tensors of one shape; those that are neither keep theirs, and do not wait where the two
        have a way of their own.
        """
        self.broadcast(x if self.rank in (src, dst) else x.clone(), src)
        return x

    def all_to_all(
        self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        """Hand each rank its rows of `x`, and return the rows that the ranks have for this one, both in rank order.

        x: [rows, ...], of one width and dtype on all ranks. sent, received: rows for each rank and from each; None =
        as many of each, which all ranks say alike.
        """
        if self.size == 1:
            return x
        counts = None if sent is None else self.all_gather(torch.tensor([list(sent)]), dim=0)  # [from, to]
        share = x.shape[0] // self.size
        most = x.shape[0] if counts is None else int(counts.sum(dim=1).max())
        padded = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
        rows = self.all_gather(padded, dim=0).split(most)
        if counts is None:
            return torch.cat([each[self.rank * share : (self.rank + 1) * share] for each in rows])
        mine = [
            each.split([*own, most - sum(own)])[self.rank] for each, own in zip(rows, counts.tolist(), strict=True)
        ]
        return torch.cat(mine)

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
