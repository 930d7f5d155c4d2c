"""Collectives between processes over TCP, each rank connected with rank 0, which sums, joins and passes on.

Made for CPU ranks on several hosts and for what the driver tells ranks on GPUs. Torch's gloo is not used: it takes
whoever calls a rank's port first and names a number counted from 0 for that rank, and knows no secret.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelError, ChannelTimeout
from parallel.group import Group, require_contiguous
from parallel.handshake import receive_into, send_all

_HEAD = struct.Struct("<BIQ")  # kind of collective, its number, bytes that follow
_SUM, _JOIN, _SPREAD = 1, 2, 3
_NUMBERS = 1 << 32


class StarGroup(Group):
    """A group over connections from `Rendezvous.connections`, which it owns.

    timeout: seconds for one collective. Sums are taken in rank order, so that all ranks get the same bits.
    """

    sums_in_order = True

    def __init__(self, connections: Sequence[socket.socket], rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._peers = range(1, size) if rank == 0 else range(1)
        self._connections = dict(zip(self._peers, connections, strict=True))
        self._timeout = timeout
        self._count = 0
        self._closed = False

    def limit(self, seconds: float) -> None:
        """Let every collective from now on take so many seconds."""
        self._timeout = seconds

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        require_contiguous(x)
        deadline = self._begin()
        if self.rank != 0:
            self._send(0, _SUM, x, deadline)
            self._receive(0, _SUM, x, deadline)
            return x
        theirs = torch.empty_like(x)
        for peer in self._peers:
            self._receive(peer, _SUM, theirs, deadline)
            x.add_(theirs)
        self._send_all(_SUM, x, deadline)
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        deadline = self._begin()
        x = x.contiguous()
        joined = x.new_empty(self.size, *x.shape)
        if self.rank == 0:
            joined[0] = x
            for peer in self._peers:
                self._receive(peer, _JOIN, joined[peer], deadline)
            self._send_all(_JOIN, joined, deadline)
        else:
            self._send(0, _JOIN, x, deadline)
            self._receive(0, _JOIN, joined, deadline)
        return torch.cat(list(joined), dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        require_contiguous(x)
        deadline = self._begin(timeout)
        if self.rank == 0:
            if src:
                self._receive(src, _SPREAD, x, deadline)
            self._send_all(_SPREAD, x, deadline, but=src)
        elif self.rank == src:
            self._send(0, _SPREAD, x, deadline)
        else:
            self._receive(0, _SPREAD, x, deadline)
        return x

    @override
    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    @override
    def close(self) -> None:
        self._closed = True
        for connection in self._connections.values():
            connection.close()

    def _begin(self, timeout: float | None = None) -> float:
        """Count a collective, and return by when it must be over."""
        if self._closed:
            raise ChannelError("collective on a group that is closed")
        self._count = (self._count + 1) % _NUMBERS
        seconds = self._timeout if timeout is None else timeout
        return math.inf if math.isinf(seconds) else time.monotonic() + seconds

    def _send_all(self, kind: int, x: Tensor, deadline: float, but: int = 0) -> None:
        for peer in self._peers:
            if peer != but:
                self._send(peer, kind, x, deadline)

    def _send(self, peer: int, kind: int, x: Tensor, deadline: float) -> None:
        data = _memory(x)
        head = _HEAD.pack(kind, self._count, len(data))
        try:
            send_all(self._connections[peer], head, deadline)
            send_all(self._connections[peer], data, deadline)
        except ChannelError as error:
            raise self._failure(peer, error) from error

    def _receive(self, peer: int, kind: int, x: Tensor, deadline: float) -> None:
        data = _memory(x)
        head = bytearray(_HEAD.size)
        try:
            receive_into(self._connections[peer], head, deadline)
            if _HEAD.unpack(head) == (kind, self._count, len(data)):
                receive_into(self._connections[peer], data, deadline)
                return
        except ChannelError as error:
            raise self._failure(peer, error) from error
        raise ChannelError(f"rank {peer} is at another collective than rank {self.rank}: out of step")

    def _failure(self, peer: int, error: ChannelError) -> ChannelError:
        if isinstance(error, ChannelTimeout):
            return ChannelTimeout(f"rank {peer} missed the deadline of collective {self._count}")
        return ChannelError(
            f"collective {self._count} of rank {self.rank} of {self.size} failed, a peer is gone: "
            f"rank {peer}: {error}"
        )


def _memory(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor themselves."""
    return x.detach().view(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")
