"""Bytes of files that go out to clients, bounded where nothing else bounds what Ray Serve holds of them.

Behind a proxy that is not guarded it takes all it is given, however slowly a client reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ApiError

MOST_BYTES = 512 << 20
RETRY_AFTER = 5  # seconds


class UnderWay:
    """Counts them. Of one event loop. most: bytes; something larger goes alone."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._bytes = 0

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count `size` bytes until their client has them. Raises `ApiError` (429) when too many are under way."""
        if self._bytes and self._bytes + size > self._most:
            raise ApiError(
                "overloaded",
                "too much of other files is on its way to clients; try again in a moment",
                status=429,
                retry_after=RETRY_AFTER,
            )
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size
