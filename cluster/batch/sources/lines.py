"""Lines of a file, none of which is held whole when it is too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedIOBase

MAX_LINE_BYTES = 64 << 20
SKIP_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file. number: from 1. text: without its end; of one that is `too_long`, BLAKE2b of it instead."""

    number: int
    text: bytes
    too_long: bool = False


def read_lines(file: BufferedIOBase, limit: int) -> Iterator[Line]:
    """Yield the lines of a file that are not blank. limit: bytes that a line may have."""
    number = 0
    while data := file.readline(limit + 2):  # and its end, as Windows writes it
        number += 1
        if number == 1:
            data = data.removeprefix(BOM)
        text = data.rstrip(b"\r\n")
        if len(text) > limit:
            yield Line(number, _skipped(file, data), too_long=True)
        elif not text.isspace() and text:
            yield Line(number, text)


def _skipped(file: BufferedIOBase, begun: bytes) -> bytes:
    """Read on to the end of a line; return its digest."""
    digest = blake2b(begun, digest_size=32)
    part = begun
    while part and not part.endswith(b"\n"):
        part = file.readline(SKIP_BYTES)
        digest.update(part)
    return digest.digest()
