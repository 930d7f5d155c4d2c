"""What routers told of one answer, in few bytes: the note of a token has about 14, and as an object 50 more."""

from __future__ import annotations

import struct
import zlib

PACKED_AT = 16 << 10  # bytes of notes that are compressed together
_LENGTH = struct.Struct("<I")


class PackedNotes:
    """Notes in the order in which they came. size: bytes that they take."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self._packed: list[bytes] = []
        self._tail = bytearray()

    def add(self, note: bytes) -> None:
        """Take in one more; `size` may fall by it."""
        self.count += 1
        self._tail += _LENGTH.pack(len(note)) + note
        self.size += _LENGTH.size + len(note)
        if len(self._tail) >= PACKED_AT:
            self._packed.append(zlib.compress(self._tail, level=1))
            self.size += len(self._packed[-1]) - len(self._tail)
            self._tail.clear()

    def notes(self) -> list[bytes]:
        """Return all as they came."""
        found: list[bytes] = []
        for part in [*map(zlib.decompress, self._packed), bytes(self._tail)]:
            at = 0
            while at < len(part):
                (length,) = _LENGTH.unpack_from(part, at)
                at += _LENGTH.size
                found.append(part[at : at + length])
                at += length
        return found

    def clear(self) -> None:
        """Drop all."""
        self.count = self.size = 0
        self._packed.clear()
        self._tail.clear()
