"""Collectives between CPU ranks of one host through shared memory, several times faster than sockets.

Each rank owns a segment with one word and two halves. For its n-th exchange it writes its data into half n mod 2,
sets the word to n, and waits until every peer's word has reached n; then everybody's data can be read. A half is
written again only two exchanges later, when every peer has shown by its word that it is done reading.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelError, ChannelTimeout
from parallel.group import Group, require_contiguous
from parallel.rendezvous import Notes
from parallel.segment import Segment
from parallel.waiting import SharedWord, wait_for_change

logger = logging.getLogger(__name__)

HALF_BYTES = 1 << 18  # larger tensors go in several exchanges
SPIN = 50e-6  # seconds of looking before parking: ranks that share the work arrive close together
_WORD_BYTES = 64  # a cache line
_SIGNS = slice(32, 48)  # for each half, what its exchange is of
_TOKEN = slice(16, 32)  # random bytes that tell a rank's segment from one of the same name on another host
_SUM, _JOIN = 0, 1  # kinds of exchange
_NONE = "none"  # what a rank without a segment tells the others
_MASK = 2**32 - 1


class HostGroup(Group):
    """A group whose all-reduce and all-gather go through shared memory; the rest goes through `inner`, which it owns.

    segments: the ranks' segments in rank order, each made by its rank. timeout: seconds for one exchange. Sums are
    taken in rank order, so that all ranks get the same bits.
    """

    sums_in_order = True

    def __init__(self, inner: Group, segments: Sequence[Segment], timeout: float) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner = inner
        self._segments = tuple(segments)
        self._timeout = timeout
        self._count = 0
        self._words = [SharedWord(segment.memory, 0) for segment in segments]
        memory = [torch.frombuffer(segment.memory, dtype=torch.uint8, offset=_WORD_BYTES) for segment in segments]
        self._signs = [memoryview(segment.memory)[_SIGNS].cast("Q") for segment in segments]
        self._halves = [half for both in memory for half in both.split(HALF_BYTES)]  # rank * 2 + half
        self._closed = False

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        require_contiguous(x)
        for piece in x.view(-1).split(HALF_BYTES // x.element_size()):
            first, *others = self._exchange(piece, _SUM)
            torch.add(first, others[0], out=piece)
            for other in others[1:]:
                piece.add_(other)
        return x

    @override
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        joined = x.new_empty(self.size, x.numel())
        start = 0
        for piece in x.contiguous().view(-1).split(HALF_BYTES // x.element_size()):
            for row, data in zip(joined, self._exchange(piece, _JOIN), strict=True):
                row[start : start + len(piece)] = data
            start += len(piece)
        return torch.cat([row.view(x.shape) for row in joined], dim)

    @override
    def broadcast(self, x: Tensor, src: int = 0, timeout: float | None = None) -> Tensor:
        return self._inner.broadcast(x, src, timeout)

    @override
    def barrier(self) -> None:
        self._inner.barrier()

    @override
    def close(self) -> None:
        self._closed = True
        for segment in self._segments:
            segment.close()
        self._inner.close()

    def _exchange(self, piece: Tensor, kind: int) -> list[Tensor]:
        """Hand `piece` to the peers; return everybody's of the same shape and dtype, in rank order.

        What is returned is valid until the next exchange. Raises `ChannelError` when a peer is at another collective.
        """
        if self._closed:
            raise ChannelError("collective on a group that is closed")
        self._count += 1
        half = self._count % 2
        parts = [data.view(piece.dtype)[: len(piece)] for data in self._halves[half::2]]
        parts[self.rank].copy_(piece)
        sign = len(piece) << 8 | piece.element_size() << 2 | kind
        self._signs[self.rank][half] = sign
        self._words[self.rank].publish(self._count & _MASK)
        deadline = time.monotonic() + self._timeout
        for peer in range(self.size):
            if peer != self.rank:
                self._await(peer, deadline)
                if self._signs[peer][half] != sign:
                    raise ChannelError(f"rank {peer} is at another collective than rank {self.rank}: out of step")
        return parts

    def _await(self, peer: int, deadline: float) -> None:
        # A peer may be one exchange ahead, never more; one behind is the only value to wait on.
        behind = (self._count - 1) & _MASK
        try:
            wait_for_change(self._words[peer], behind, SPIN, deadline, partial(self._check, peer))
        except ChannelTimeout as error:
            raise ChannelTimeout(f"rank {peer} missed the deadline of exchange {self._count}") from error

    def _check(self, peer: int) -> None:
        if not self._segments[peer].owner_alive():
            raise ChannelError(f"rank {peer} is gone")


def through_shared_memory(group: Group, notes: Notes, timeout: float) -> Group:
    """Return `group` with its hot collectives moved to shared memory, or as it is when the ranks share none.

    notes: where the ranks tell each other their segments, used by nobody else. timeout: seconds for one exchange.
    """
    segments: list[Segment] = []
    try:
        own = Segment.create(_WORD_BYTES + 2 * HALF_BYTES)
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
        return HostGroup(group, segments, timeout)
    for segment in segments:
        segment.close()
    return group


def _attach(text: str) -> Segment:
    token, _, name = text.partition(" ")
    if text == _NONE:
        raise ChannelError("a peer has no shared memory")
    segment = Segment.attach(name)
    if len(segment.memory) < _WORD_BYTES or segment.memory[_TOKEN].hex() != token:
        raise ChannelError(f"{name} is not the peer's segment")
    return segment
