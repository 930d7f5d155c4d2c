"""Groups whose ranks are threads of the test's own process, for properties that need many examples."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from parallel.group import SoloGroup

T = TypeVar("T")


class ThreadGroup(SoloGroup):
    """One rank; its peers run in other threads. sent: bytes that this rank handed to all others.

    turn: held by the one thread that runs, for what several threads cannot do at a time; None = all run.
    """

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: Barrier, turn: Lock | None) -> None:
        super().__init__("cpu")
        self.rank, self.size = rank, len(parts)
        self.sums_in_order = self.size <= 2
        self._parts = parts
        self._barrier = barrier
        self._turn = turn
        self.sent = 0

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.sent += x.nbytes
        self._parts[self.rank] = x
        self._meet()
        joined = torch.cat([part for part in self._parts if part is not None], dim)
        self._meet()
        return joined

    def _meet(self) -> None:
        if self._turn is None:
            self._barrier.wait()
            return
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        shape = x.shape
        x.copy_(self.all_gather(x.view(1, -1), 0).sum(dim=0).view(shape))
        return x


def on_ranks(size: int, act: Callable[[ThreadGroup], T], in_turn: bool = False) -> list[T]:
    """Return what `act` returns on each of `size` ranks, in rank order. in_turn: one thread runs at a time."""
    parts: list[Tensor | None] = [None] * size
    barrier = Barrier(size, timeout=20)
    turn = Lock() if in_turn else None

    def run(rank: int) -> T:
        with turn or nullcontext():
            try:
                return act(ThreadGroup(rank, parts, barrier, turn))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
