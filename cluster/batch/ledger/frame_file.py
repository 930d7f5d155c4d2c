"""A file that only grows, frame by frame, each with its length and checksum: a torn write is seen and left out.

A frame is 4 bytes of length (little-endian), 8 bytes of BLAKE2b over length and payload, and the payload.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from cluster.batch.errors import LedgerError
from cluster.private_files import FILE

LENGTH_BYTES = 4
CHECKSUM_BYTES = 8
HEAD_BYTES = LENGTH_BYTES + CHECKSUM_BYTES
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame. start, end: where it lies in its file, in bytes."""

    start: int
    end: int
    payload: bytes


def framed(payload: bytes) -> bytes:
    """Return `payload` as a frame."""
    length = len(payload).to_bytes(LENGTH_BYTES, "little")
    return length + _checksum(length, payload) + payload


class FrameWriter:
    """Appends frames to a new file. What was written outlives this process at once, and the machine after `sync`.

    Raises `LedgerError` where a write fails (a full disk): the file then ends in part of a frame, which readers leave
    out, and the writer takes no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._dirty = False
        self._broken: OSError | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, payloads: list[bytes]) -> list[int]:
        """Write frames in one go, and return where each starts."""
        starts, data = [], bytearray()
        for payload in payloads:
            starts.append(self.size + len(data))
            data += framed(payload)
        self._write(bytes(data))
        return starts

    def sync(self) -> None:
        """Return when everything that was written is on the disk. May run in a thread beside `append`."""
        if self._dirty:
            self._dirty = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise _failed(self.path, error) from error

    def close(self) -> None:
        """Let go of the file. Can be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Let go of the file, and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if self._broken is not None:
            raise _failed(self.path, self._broken) from self._broken
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._broken = error
            raise _failed(self.path, error) from error
        self.size += len(data)
        self._dirty = True


def read_frames(path: Path, limit: int | None = None) -> Iterator[Frame]:
    """Yield the whole frames of a file, up to byte `limit`; ends quietly where a frame is torn or damaged.

    Raises `LedgerError` when the file cannot be read.
    """
    try:
        with path.open("rb", READ_BYTES) as file:
            yield from _frames(file, limit)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from error


def read_payload(file: BinaryIO, start: int) -> bytes:
    """Return the payload of the frame at `start`. Raises `LedgerError` when there is no whole frame."""
    file.seek(start)
    frame = next(_frames(file, None), None)
    if frame is None:
        raise LedgerError(f"{file.name}: the frame at byte {start} is damaged; run the batch anew without it")
    return frame.payload


def _frames(file: BinaryIO, limit: int | None) -> Iterator[Frame]:
    start = file.tell()
    while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        end = start + HEAD_BYTES + length
        if length > MAX_FRAME_BYTES or (limit is not None and end > limit):
            return
        payload = file.read(length)
        if len(payload) < length or _checksum(head[:LENGTH_BYTES], payload) != head[LENGTH_BYTES:]:
            return
        yield Frame(start, end, payload)
        start = end


def _checksum(length: bytes, payload: bytes) -> bytes:
    return blake2b(length + payload, digest_size=CHECKSUM_BYTES).digest()


def _failed(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"{path} cannot be written ({error.strerror}); make room there and run the same command with --resume: what "
        "was done so far is kept"
    )
