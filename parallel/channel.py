"""The way from the driver to its workers: one message a step, each with a deadline.

A message is named numpy arrays in one contiguous buffer, read back as views without copying. Layout, little-endian:
prefix (magic, version, kind, number, total bytes, sizes of schema and shapes), checksum of the prefix and the two
that follow, schema (names and dtypes as text), shapes (int64), then each array at a multiple of `ALIGNMENT`. The
arrays' own bytes are checked by length only.
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from parallel.errors import ChannelClosed, ChannelError
from parallel.group import Group

MAGIC = b"SQDN"
VERSION = 1
ALIGNMENT = 16  # bytes; enough for any vector load that torch makes of a tensor it did not allocate
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

Schema = tuple[tuple[str, np.dtype[Any], int], ...]  # name, dtype and number of dimensions of each array

_PREFIX = struct.Struct("<4sHHqQII")
_CHECKSUM = struct.Struct("<I")
_START = _PREFIX.size + _CHECKSUM.size
_PADDING = [bytes(count) for count in range(ALIGNMENT)]
_CODES = {np.dtype(name): name for name in DTYPES}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """What the driver sends its workers: what kind of message, its number, and arrays by name.

    kind: 0 to 65,535, given meaning by the sender. number: int64, such as the step's.
    """

    kind: int = 0
    number: int = 0
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def pack(message: ChannelMessage) -> bytearray:
    """Return `message` as one buffer.

    Raises `ValueError` for an array whose dtype is not in `DTYPES` or whose name has a space or a comma.
    """
    arrays = [array if array.flags.c_contiguous else array.copy("C") for array in message.arrays.values()]
    fields = [_field(name, array) for name, array in zip(message.arrays, arrays, strict=True)]
    schema = ",".join(fields).encode()
    shapes = [size for array in arrays for size in array.shape]
    table = schema + struct.pack(f"<{len(shapes)}q", *shapes)
    size = _START + len(table)
    parts: list[Any] = [b"", b"", table, _PADDING[-size % ALIGNMENT]]
    size += -size % ALIGNMENT
    for array in arrays:
        padding = -array.nbytes % ALIGNMENT
        parts += (array, _PADDING[padding])
        size += array.nbytes + padding
    parts[0] = _PREFIX.pack(MAGIC, VERSION, message.kind, message.number, size, len(schema), 8 * len(shapes))
    parts[1] = _CHECKSUM.pack(zlib.crc32(table, zlib.crc32(parts[0])))
    # Joining copies each array once, without a Python-level view of it.
    return bytearray().join(parts)


def unpack(buffer: Buffer) -> ChannelMessage:
    """Return the message in `buffer`; its arrays are views of the buffer and live only as long as that is not reused.

    Raises `ChannelError` when the buffer is short, damaged or from another version.
    """
    view = memoryview(buffer)
    kind, number, schema, shapes, offset = _open(view)
    arrays: dict[str, NDArray[Any]] = {}
    axis = 0
    for name, dtype, ndim in schema:
        shape = shapes[axis : axis + ndim]
        axis += ndim
        end = offset + prod(shape) * dtype.itemsize
        if len(shape) != ndim or min(shape, default=0) < 0 or end > len(view):
            raise ChannelError(f"array {name!r} of shape {shape} does not fit a message of {len(view)} bytes")
        arrays[name] = np.ndarray(shape, dtype, view, offset)
        offset = end + -end % ALIGNMENT
    return ChannelMessage(kind, number, arrays)


def _open(view: memoryview) -> tuple[int, int, Schema, tuple[int, ...], int]:
    """Check the prefix and the table; return kind, number, schema, shapes and where the first array begins."""
    if len(view) < _START:
        raise ChannelError(f"a message of {len(view)} bytes is shorter than its prefix of {_START}")
    magic, version, kind, number, total, schema_size, shapes_size = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ChannelError(f"not a message of version {VERSION}: it begins with {bytes(view[:6])!r}")
    middle = _START + schema_size
    end = middle + shapes_size
    if total != len(view) or end > total:
        raise ChannelError(f"a message of {total} bytes came as {len(view)} bytes")
    checksum = zlib.crc32(view[_START:end], zlib.crc32(view[: _PREFIX.size]))
    if (checksum,) != _CHECKSUM.unpack_from(view, _PREFIX.size):
        raise ChannelError("a message's prefix or table of arrays is damaged: its checksum differs")
    shapes = struct.unpack_from(f"<{shapes_size // 8}q", view, middle)
    return kind, number, _schema(bytes(view[_START:middle])), shapes, end + -end % ALIGNMENT


def _field(name: str, array: NDArray[Any]) -> str:
    code = _CODES.get(array.dtype)
    if code is None:
        raise ValueError(f"array {name!r} has dtype {array.dtype}; a message carries {', '.join(DTYPES)}")
    if "," in name or " " in name:
        raise ValueError(f"array name {name!r} has a comma or a space")
    return f"{name} {code} {array.ndim}"


@lru_cache(maxsize=32)
def _schema(text: bytes) -> Schema:
    """Parse a schema; steps have few different ones, so nearly every message finds its own parsed already."""
    entries = (entry.split(" ") for entry in text.decode().split(",") if entry)
    return tuple((name, np.dtype(dtype), int(ndim)) for name, dtype, ndim in entries)


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

    def readers_behind(self) -> tuple[int, ...]:
        """Return the ranks that are known not to have come back for more since the driver's last message."""
        return ()

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
            # Where the workers are gone already none is left to hear it.
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
