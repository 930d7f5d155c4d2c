"""The way from the driver to its workers: one message a step, each with a deadline."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelClosed, ChannelError
from parallel.group import Group
from parallel.packing import Buffer

_LENGTH = 8  # bytes of the length that goes before the message
_END = -1  # length that says that no message will follow
CLOSING = 5.0  # seconds that closing may take


class Channel(ABC):
    """One writer (the driver, rank 0) and its readers (the workers). Each end is used by one thread.

    Messages arrive whole, in order, at every reader. After any error but `ChannelClosed` the group must end.
    """

    @abstractmethod
    def send(self, message: Buffer, timeout: float) -> None:
        """Hand `message` to all readers; returns before they have read it where there is room.

        Raises `ChannelTimeout` when readers leave no room for `timeout` seconds, `ChannelError` when one is gone.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> memoryview:
        """Return the next message; its bytes stay valid until the next call. None waits as long as the driver lives.

        Raises `ChannelTimeout` after `timeout` seconds, `ChannelClosed` once the driver has closed the channel and
        all of its messages are read, `ChannelError` when the driver is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of this end; the driver's wakes and ends all readers. Can be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BroadcastChannel(Channel):
    """A channel over the group's broadcast, for workers on other hosts; rank 0 sends, all others receive.

    The first broadcast carries the length and, where it fits, the whole message, so that a usual step costs one.
    """

    def __init__(self, group: Group, inline_bytes: int = 16384) -> None:
        self._group = group
        self._inline_bytes = inline_bytes
        self._closed = False

    @override
    def send(self, message: Buffer, timeout: float) -> None:
        if self._closed or self._group.rank != 0:
            raise ChannelError("only rank 0's open end of a channel sends")
        payload = torch.frombuffer(bytearray(message), dtype=torch.uint8) if len(message) else torch.empty(0)
        self._send_first(len(message), payload, timeout)
        rest = payload[self._inline_bytes :]
        if len(rest):
            self._group.broadcast(rest.to(self._group.device), timeout=timeout)

    @override
    def receive(self, timeout: float | None = None) -> memoryview:
        if self._closed or self._group.rank == 0:
            raise ChannelError("only a worker's open end of a channel receives")
        # An idle driver may say nothing for hours; if it dies, its connection breaks and ends the wait.
        first = self._group.broadcast(self._first(), timeout=math.inf if timeout is None else timeout).cpu()
        length = int(first[:_LENGTH].view(torch.int64))
        if length == _END:
            raise ChannelClosed("the driver has closed the channel")
        if length <= self._inline_bytes:
            return _bytes(first[_LENGTH : _LENGTH + length])
        rest = torch.empty(length - self._inline_bytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(rest, timeout=timeout)
        return _bytes(torch.cat([first[_LENGTH:], rest.cpu()]))

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._group.rank == 0:
            # Where the workers are gone already there is nobody left to tell.
            with suppress(ChannelError):
                self._send_first(_END, torch.empty(0), CLOSING)

    def _send_first(self, length: int, payload: Tensor, timeout: float) -> None:
        first = torch.zeros(_LENGTH + self._inline_bytes, dtype=torch.uint8)
        first[:_LENGTH].view(torch.int64).fill_(length)
        part = payload[: self._inline_bytes]
        first[_LENGTH : _LENGTH + len(part)] = part
        self._group.broadcast(first.to(self._group.device), timeout=timeout)

    def _first(self) -> Tensor:
        return torch.empty(_LENGTH + self._inline_bytes, dtype=torch.uint8, device=self._group.device)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
