"""Collectives between CPU ranks: over TCP, and on one host through shared memory, several times faster.

Over TCP each rank is connected with rank 0, which sums, joins and passes on: for ranks on several hosts, and for
what the driver sends ranks on GPUs. Torch's gloo is not used: it takes any caller of a rank's port that names the
right small number for that rank, and knows no secret.

How ranks of one host meet in shared memory is told in `exchange`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelError, ChannelTimeout
from parallel.exchange import HALF_BYTES, WORD_BYTES, Exchange, NativeExchange, exchange_library
from parallel.group import Group, require_contiguous
from parallel.hub import receive_into, send_all
from parallel.rendezvous import Notes
from parallel.shared_memory import Segment

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<BIQ")  # kind of collective, its number, bytes that follow
_SUM, _JOIN, _SPREAD, _PASS = 1, 2, 3, 4
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
    def transfer(self, x: Tensor, src: int, dst: int) -> Tensor:
        """Pass it on in rank 0, to which alone all ranks are connected."""
        require_contiguous(x)
        deadline = self._begin()
        if src == dst:
            return x
        if self.rank == 0:
            passed = x if 0 in (src, dst) else torch.empty_like(x)
            if src:
                self._receive(src, _PASS, passed, deadline)
            if dst:
                self._send(dst, _PASS, passed, deadline)
        elif self.rank == src:
            self._send(0, _PASS, x, deadline)
        elif self.rank == dst:
            self._receive(0, _PASS, x, deadline)
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


_TOKEN = slice(16, 32)  # random bytes that distinguish a rank's segment from one of the same name on another host
_NONE = "none"  # what a rank without a segment sends the others


class HostGroup(Group):
    """A group whose all-reduce and all-gather go through shared memory; the rest goes through `inner`, which it owns.

    segments: the ranks' segments in rank order, each made by its rank. timeout: seconds for one exchange. Sums are
    taken in rank order, so that all ranks get the same bits. library: of `exchange_library`, None = in Python.
    """

    sums_in_order = True

    def __init__(
        self, inner: Group, segments: Sequence[Segment], timeout: float, library: CDLL | None = None
    ) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner = inner
        self._segments = tuple(segments)
        self._exchange = (
            Exchange(segments, inner.rank, timeout)
            if library is None
            else NativeExchange(segments, inner.rank, timeout, library)
        )
        self._closed = False

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        require_contiguous(x)
        self._check_open()
        for piece in x.view(-1).split(HALF_BYTES // x.element_size()):
            self._exchange.add(piece)
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self._check_open()
        joined = x.new_empty(self.size, x.numel())
        start = 0
        for piece in x.contiguous().view(-1).split(HALF_BYTES // x.element_size()):
            for row, data in zip(joined, self._exchange.join(piece), strict=True):
                row[start : start + len(piece)] = data
            start += len(piece)
        return torch.cat([row.view(x.shape) for row in joined], dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return self._inner.broadcast(x, src, timeout)

    @override
    def transfer(self, x: Tensor, src: int, dst: int) -> Tensor:
        return self._inner.transfer(x, src, dst)

    @override
    def barrier(self) -> None:
        self._inner.barrier()

    @override
    def close(self) -> None:
        self._closed = True
        for segment in self._segments:
            segment.close()
        self._inner.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelError("collective on a group that is closed")


def through_shared_memory(group: Group, notes: Notes, timeout: float) -> Group:
    """Return `group` with its hot collectives moved to shared memory, or as it is when the ranks share none.

    notes: where the ranks tell each other their segments, used for nothing else. timeout: seconds for one exchange.
    """
    segments: list[Segment] = []
    try:
        own = Segment.create(WORD_BYTES + 2 * HALF_BYTES)
        own.memory[_TOKEN] = token = os.urandom(16)
        segments.append(own)
        notes.set(str(group.rank), f"{token.hex()} {own.name}")
        names = [notes.get(str(rank)) for rank in range(group.size)]
        segments = [own if rank == group.rank else _attach(name) for rank, name in enumerate(names)]
    except ChannelError as error:
        logger.info("rank %d shares no memory with the others: %s", group.rank, error)
        notes.set(str(group.rank), _NONE)
    shared = int(group.all_reduce(torch.tensor([len(segments)])))
    if shared == group.size**2:
        own.unlink()  # all have attached, so nothing can leak any more
        return HostGroup(group, segments, timeout, exchange_library())
    for segment in segments:
        segment.close()
    return group


def _attach(text: str) -> Segment:
    token, _, name = text.partition(" ")
    if text == _NONE:
        raise ChannelError("a peer has no shared memory")
    segment = Segment.attach(name)
    if len(segment.memory) < WORD_BYTES or segment.memory[_TOKEN].hex() != token:
        raise ChannelError(f"{name} is not the peer's segment")
    return segment
