"""Groups whose ranks are threads of the test's own process, for properties that need many examples."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from parallel.group import SoloGroup

T = TypeVar("T")


class ThreadGroup(SoloGroup):
    """One rank; its peers run in other threads. sent: bytes that this rank handed to all others."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: Barrier) -> None:
        super().__init__("cpu")
        self.rank, self.size = rank, len(parts)
        self.sums_in_order = self.size <= 2
        self._parts = parts
        self._barrier = barrier
        self.sent = 0

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.sent += x.nbytes
        self._parts[self.rank] = x
        self._barrier.wait()
        joined = torch.cat([part for part in self._parts if part is not None], dim)
        self._barrier.wait()
        return joined

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        shape = x.shape
        x.copy_(self.all_gather(x.view(1, -1), 0).sum(dim=0).view(shape))
        return x


def on_ranks(size: int, act: Callable[[ThreadGroup], T]) -> list[T]:
    """Return what `act` returns on each of `size` ranks, in rank order."""
    parts: list[Tensor | None] = [None] * size
    barrier = Barrier(size, timeout=20)

    def run(rank: int) -> T:
        try:
            return act(ThreadGroup(rank, parts, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
