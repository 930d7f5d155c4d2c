"""Copies of int32 from memory of the host to the device that the host does not wait for."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy that may still be under way."""

    def synchronize(self) -> None:
        """Wait until it is done and its source may be written again."""


class HostCopies(Protocol):
    """How a device is reached from the host."""

    def pinned(self, count: int) -> Tensor:
        """Return memory of the host that the device can read by itself, [count] int32."""

    def send(self, source: Tensor, target: Tensor) -> Copy:
        """Start to copy `source`, which is pinned, to the device, after all that was asked of it before."""


class CudaCopies:
    """Copies on the current stream."""

    def pinned(self, count: int) -> Tensor:
        """See `HostCopies`."""
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Copy:
        """See `HostCopies`."""
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(target.device))
        return done


class HostPair:
    """Two pinned buffers in turn: one is filled while the other's copy may be under way."""

    def __init__(self, copies: HostCopies, count: int) -> None:
        """count: int32 that each holds."""
        self._copies = copies
        self._buffers = [copies.pinned(count) for _ in range(2)]
        self._under_way: list[Copy | None] = [None, None]
        self._turn = 0

    def next(self) -> Tensor:
        """Return the buffer to fill now, [count]; waits until what was sent from it last has arrived."""
        self._turn = 1 - self._turn
        copy = self._under_way[self._turn]
        if copy is not None:
            copy.synchronize()
            self._under_way[self._turn] = None
        return self._buffers[self._turn]

    def send(self, target: Tensor) -> None:
        """Start to copy as much as `target` holds from the head of the buffer that `next` returned."""
        source = self._buffers[self._turn][: len(target)]
        self._under_way[self._turn] = self._copies.send(source, target)
