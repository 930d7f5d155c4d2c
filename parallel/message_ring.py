"""A ring of message slots in shared memory: the driver writes, every worker of the host reads.

Memory: one cache line of head and geometry, one line per reader, then the slots. The head counts slots written (and
holds the closed mark in its lowest bit), each reader's tail those it is done with; a slot is free again when all
tails have passed it. A waiting process looks for a short time, then parks in the kernel until that word changes.
"""

from __future__ import annotations

import struct
import time

from typing_extensions import override

from parallel.channel import Buffer, Channel
from parallel.errors import ChannelClosed, ChannelError, ChannelTimeout
from parallel.shared_memory import Fence, Segment, SharedWord, wait_for_change

SPIN = 50e-6  # seconds of looking before parking; parking costs about 5 us more than looking, waking a core up to 30
LINE = 64  # bytes; words that different processes write must not share a cache line

_MAGIC = b"SQRG"
_GEOMETRY = struct.Struct("<4sIII")  # magic, readers, slots, bytes per slot
_GEOMETRY_AT = 16
_ATTACHED_AT = 8  # within a reader's line
_SLOT = struct.Struct("<QQQ")  # count of slots before this one, bytes of the whole message, where this piece begins
_CLOSED = 1
_MASK = 2**31 - 1  # counts are kept modulo 2^31, so that head = count * 2 + closed fits 32 bits


class SharedMemoryRing(Channel):
    """Channel between the processes of one host. `create` makes the driver's end, `attach` a worker's.

    A message that is larger than a slot goes in pieces. A worker's `receive` returns a view of the slot itself.
    """

    def __init__(self, segment: Segment, reader: int | None, spin: float) -> None:
        magic, self._readers, self._slots, self._slot_bytes = _GEOMETRY.unpack_from(segment.memory, _GEOMETRY_AT)
        if magic != _MAGIC or len(segment.memory) != _size(self._readers, self._slots, self._slot_bytes):
            raise ChannelError(f"{segment.name} is not a message ring")
        if reader is not None and not 0 <= reader < self._readers:
            raise ChannelError(f"reader must be 0 to {self._readers - 1}, not {reader}")
        self.name = segment.name
        self.path = segment.path
        self._segment: Segment | None = segment
        self._reader = reader
        self._spin = spin
        self._count = 0  # slots written, or read
        self._memory = memoryview(segment.memory)
        self._head = SharedWord(segment.memory, 0)
        self._tails = [SharedWord(segment.memory, LINE * (1 + index)) for index in range(self._readers)]

    @classmethod
    def create(cls, readers: int, slots: int = 8, slot_bytes: int = 1 << 16, spin: float = SPIN) -> SharedMemoryRing:
        """Make a ring for `readers` workers; hand `name` to them. Raises `ChannelError` when memory is short."""
        if readers < 1 or slots < 2 or slot_bytes < LINE or slot_bytes % LINE:
            raise ValueError(
                f"a ring needs 1 reader, 2 slots and a multiple of {LINE} bytes per slot at least, "
                f"not {readers}, {slots} and {slot_bytes}"
            )
        segment = Segment.create(_size(readers, slots, slot_bytes))
        _GEOMETRY.pack_into(segment.memory, _GEOMETRY_AT, _MAGIC, readers, slots, slot_bytes)
        return cls(segment, None, spin)

    @classmethod
    def attach(cls, name: str, reader: int, spin: float = SPIN) -> SharedMemoryRing:
        """Open the driver's ring as reader 0, 1, ...; each number is used once, before the driver closes the ring.

        Raises `ChannelError` when the ring is gone or has no such reader.
        """
        segment = Segment.attach(name)
        ring = cls(segment, reader, spin)
        ring._memory[LINE * (1 + reader) + _ATTACHED_AT] = 1
        Fence().pass_through()  # of two that attach at once, one sees both
        if all(ring._memory[LINE * (1 + index) + _ATTACHED_AT] for index in range(ring._readers)):
            segment.unlink()
        return ring

    @override
    def send(self, message: Buffer, timeout: float) -> None:
        if self._segment is None or self._reader is not None:
            raise ChannelError("only the driver's open end of a ring sends")
        whole = memoryview(message).cast("B")
        deadline = time.monotonic() + timeout
        room = self._slot_bytes - _SLOT.size
        for start in range(0, max(len(whole), 1), room):
            self._await_room(deadline)
            piece = whole[start : start + room]
            at = self._slot_at(self._count)
            _SLOT.pack_into(self._memory, at, self._count, len(whole), start)
            self._memory[at + _SLOT.size : at + _SLOT.size + len(piece)] = piece
            self._count += 1
            self._head.publish((self._count & _MASK) << 1)

    @override
    def receive(self, timeout: float | None = None) -> memoryview:
        if self._segment is None or self._reader is None:
            raise ChannelError("only a worker's open end of a ring receives")
        deadline = None if timeout is None else time.monotonic() + timeout
        total, _, piece = self._next(deadline)
        if len(piece) == total:
            return piece
        whole = memoryview(bytearray(total))
        filled = 0
        while True:
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled == total:
                return whole
            size, start, piece = self._next(deadline)
            if (size, start) != (total, filled):
                raise ChannelError(f"byte {filled} of a message of {total} was followed by byte {start} of {size}")

    @override
    def readers_behind(self) -> tuple[int, ...]:
        done = self._count & _MASK
        return tuple(rank for rank, tail in enumerate(self._tails, start=1) if tail.value != done)

    @override
    def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if self._reader is None:
            self._head.publish((self._count & _MASK) << 1 | _CLOSED)
        segment.close()

    def _next(self, deadline: float | None) -> tuple[int, int, memoryview]:
        """Free the last slot, wait for the next; return its message's size, where its piece begins, and the piece."""
        seen = self._count & _MASK
        self._tails[self._reader or 0].publish(seen)
        wait_for_change(self._head, seen << 1, self._spin, deadline, self._check_driver)
        if self._head.value == seen << 1 | _CLOSED:
            raise ChannelClosed("the driver has closed the channel")
        at = self._slot_at(self._count)
        count, total, start = _SLOT.unpack_from(self._memory, at)
        if count != self._count or start >= max(total, 1):
            raise ChannelError(f"slot of message {self._count} holds message {count}: the ring is damaged")
        self._count += 1
        at += _SLOT.size
        return total, start, self._memory[at : at + min(self._slot_bytes - _SLOT.size, total - start)]

    def _await_room(self, deadline: float) -> None:
        for reader, tail in enumerate(self._tails):
            while (self._count - (done := tail.value)) & _MASK >= self._slots:
                try:
                    wait_for_change(tail, done, self._spin, deadline, _no_check)
                except ChannelTimeout as error:
                    raise ChannelTimeout(
                        f"rank {reader + 1} left no room for message {self._count} in time"
                    ) from error

    def _check_driver(self) -> None:
        if self._segment is not None and not self._segment.owner_alive() and not self._head.value & _CLOSED:
            raise ChannelError("the driver is gone and did not close the channel")

    def _slot_at(self, count: int) -> int:
        return LINE * (1 + self._readers) + count % self._slots * self._slot_bytes


def _no_check() -> None:
    """Workers' deaths are noticed by their starter, not by the ring."""


def _size(readers: int, slots: int, slot_bytes: int) -> int:
    return LINE * (1 + readers) + slots * slot_bytes
