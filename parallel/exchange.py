"""What ranks of one host hand each other through shared memory, all to all at once.

Each rank owns a segment with one word and two halves. For its n-th exchange it writes its data into half n mod 2,
sets the word to n, and waits until every peer's word has reached n; then everybody's data can be read. A half is
written again only two exchanges later, when every peer has shown by its word that it is done reading.

`NativeExchange` is the same in C, where there is a compiler: an exchange of a few kilobytes costs Python a few dozen
operations, and a layer has two.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from parallel.c_library import compile_library
from parallel.errors import ChannelError, ChannelTimeout
from parallel.shared_memory import TICK, Segment, SharedWord, wait_for_change

logger = logging.getLogger(__name__)

HALF_BYTES = 1 << 18  # what an exchange holds at most
WORD_BYTES = 64  # before the halves: a cache line
SPIN = 50e-6  # seconds of looking before parking: ranks that share the work arrive close together
SUMMED, JOINED = 0, 1  # kinds of exchange
_SIGNS = slice(32, 48)  # for each half, what its exchange is of
_MASK = 2**32 - 1
_SOURCE = Path(__file__).parent / "exchange.c"
_ADDING = {torch.float32: "add_floats", torch.bfloat16: "add_halves"}


class Exchange:
    """The exchanges of one rank, in Python.

    segments: the ranks' segments in rank order. timeout: seconds for one exchange.
    """

    def __init__(self, segments: Sequence[Segment], rank: int, timeout: float) -> None:
        self._segments = tuple(segments)
        self._rank = rank
        self._timeout = timeout
        self._count = 0
        self._words = [SharedWord(segment.memory, 0) for segment in segments]
        memory = [torch.frombuffer(segment.memory, dtype=torch.uint8, offset=WORD_BYTES) for segment in segments]
        self._signs = [memoryview(segment.memory)[_SIGNS].cast("Q") for segment in segments]
        self._halves = [half for both in memory for half in both.split(HALF_BYTES)]  # rank * 2 + half

    def join(self, piece: Tensor, kind: int = JOINED) -> list[Tensor]:
        """Hand `piece`, flat, to the peers; return everybody's of the same shape and dtype, in rank order.

        What is returned is valid until the next exchange. Raises `ChannelError` when a peer is gone or at another
        collective, `ChannelTimeout` at the deadline.
        """
        self._count += 1
        half = self._count % 2
        parts = [data.view(piece.dtype)[: len(piece)] for data in self._halves[half::2]]
        sign = _sign(piece, kind)
        self._trade(piece, parts[self._rank], sign)
        for rank, signs in enumerate(self._signs):
            if signs[half] != sign:
                raise _out_of_step(rank, self._rank)
        return parts

    def add(self, piece: Tensor) -> None:
        """Replace `piece`, flat and contiguous, by the sum of all ranks', in their order. Raises what `join` does."""
        first, *others = self.join(piece, SUMMED)
        torch.add(first, others[0], out=piece)
        for other in others[1:]:
            piece.add_(other)

    def _trade(self, piece: Tensor, own: Tensor, sign: int) -> None:
        """Write `piece` to this rank's half, `own`, and wait for what the others write to theirs."""
        own.copy_(piece)
        self._signs[self._rank][self._count % 2] = sign
        self._words[self._rank].publish(self._count & _MASK)
        deadline = time.monotonic() + self._timeout
        for peer in range(len(self._segments)):
            if peer != self._rank:
                self._await(peer, deadline)

    def _await(self, peer: int, deadline: float) -> None:
        # A peer may be one exchange ahead, never more; one behind is the only value to wait on.
        behind = (self._count - 1) & _MASK
        try:
            wait_for_change(self._words[peer], behind, SPIN, deadline, partial(self._check, peer))
        except ChannelTimeout as error:
            raise self._late(peer) from error

    def _check(self, peer: int) -> None:
        if not self._segments[peer].owner_alive():
            raise ChannelError(f"rank {peer} is gone")

    def _late(self, peer: int) -> ChannelTimeout:
        return ChannelTimeout(f"rank {peer} missed the deadline of exchange {self._count}")


class _Group(ctypes.Structure):
    """`Group` of exchange.c."""

    _fields_ = (
        ("segments", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "half_bytes", "spin", "tick")),
        ("count", c_uint64),
    )


class NativeExchange(Exchange):
    """The same in C, of ranks in C or in Python. library: of `exchange_library`."""

    def __init__(self, segments: Sequence[Segment], rank: int, timeout: float, library: ctypes.CDLL) -> None:
        super().__init__(segments, rank, timeout)
        self._library = library
        mapped = [ctypes.c_char.from_buffer(segment.memory) for segment in segments]  # keeps the mappings alive
        self._addresses = (c_void_p * len(mapped))(*map(ctypes.addressof, mapped))
        self._mapped = mapped
        spin, tick = int(SPIN * 1e9), int(TICK * 1e9)
        self._group = _Group(ctypes.addressof(self._addresses), rank, len(segments), HALF_BYTES, spin, tick, 0)
        self._pointer = ctypes.byref(self._group)

    @override
    def add(self, piece: Tensor) -> None:
        adding = _ADDING.get(piece.dtype)
        if adding is None:
            super().add(piece)
            return
        self._count += 1
        self._swap(piece, _sign(piece, SUMMED))
        stray = self._library.out_of_step(self._pointer)
        if stray >= 0:
            raise _out_of_step(stray, self._rank)
        getattr(self._library, adding)(self._pointer, piece.data_ptr(), len(piece))

    @override
    def _trade(self, piece: Tensor, own: Tensor, sign: int) -> None:
        self._swap(piece, sign)

    def _swap(self, piece: Tensor, sign: int) -> None:
        deadline = time.monotonic() + self._timeout
        self._library.give(self._pointer, piece.data_ptr(), piece.nbytes, sign)
        while (late := self._library.take(self._pointer)) >= 0:
            self._check(late)
            if time.monotonic() > deadline:
                raise self._late(late)


def exchange_library() -> ctypes.CDLL | None:
    """Return exchange.c compiled, None where it cannot be, or there is no futex."""
    if sys.platform != "linux":
        return None
    library = compile_library([_SOURCE], (), {}, "ranks exchange in Python")
    if library is not None:
        library.give.argtypes = (c_void_p, c_void_p, c_int64, c_uint64)
        library.take.argtypes = library.out_of_step.argtypes = (c_void_p,)
        library.take.restype = library.out_of_step.restype = c_int64
        library.add_floats.argtypes = library.add_halves.argtypes = (c_void_p, c_void_p, c_int64)
        for name in ("give", "add_floats", "add_halves"):
            getattr(library, name).restype = None
    return library


def _sign(piece: Tensor, kind: int) -> int:
    return len(piece) << 8 | piece.element_size() << 2 | kind


def _out_of_step(rank: int, own: int) -> ChannelError:
    return ChannelError(f"rank {rank} is at another collective than rank {own}: out of step")
