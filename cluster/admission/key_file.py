"""A key file that is read anew when it changes, without a restart and without a moment in which keys are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from cluster.admission.key_text import parse_keys
from cluster.admission.keys import KeyEntry, KeyRing
from engine.errors import ConfigError

POLL_SECONDS = 1.0
logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


class KeyFile:
    """The keys of one file. `ring` is replaced as a whole; a file that cannot be read or is wrong leaves it as it is.

    A changed file is read only when it looked the same on two polls and while it was read: a half-written list must
    not shut out the keys that are still to be written. So a change counts after one to two polls.
    more: keys that are valid beside those of the file; of the same key, the file's entry holds.
    Raises `ConfigError` that names file and line when the first reading fails.
    """

    def __init__(self, path: Path, more: Sequence[KeyEntry] = (), poll_seconds: float = POLL_SECONDS) -> None:
        self._path = path
        self._more = more
        self._poll_seconds = poll_seconds
        try:
            stamp = self._stamp()
            self.ring = self._read()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}", "api_key_file") from error
        self._taken: Stamp | None = stamp  # what `ring` or the last complaint was made from; None = there was no file
        self._seen: Stamp | None = stamp  # what the last poll saw

    async def watch(self) -> None:
        """Poll the file until cancelled. Reading is left to a thread: the disk may be slow."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await asyncio.to_thread(self.poll)
            except Exception:
                # Whatever is wrong with the file, the keys that are known go on being valid.
                logger.exception("the API keys in %s could not be read; those read before stay valid", self._path)

    def poll(self) -> bool:
        """Look at the file once; return whether `ring` was replaced. A wrong file is logged once for each change."""
        try:
            stamp = self._stamp()
            settled, self._seen = stamp == self._seen, stamp
            if not settled or stamp == self._taken:
                return False
            ring = self._read()
            if self._stamp() != stamp:
                return False
        except OSError as error:
            self._keep_old(None, f"{self._path}: {error.strerror or error}")
            return False
        except ConfigError as error:
            self._keep_old(stamp, str(error))
            return False
        self._taken, self.ring = stamp, ring
        logger.info("%s was read again: %d API keys of %d tenants", self._path, len(ring), len(ring.tenants))
        return True

    def _keep_old(self, stamp: Stamp | None, problem: str) -> None:
        if stamp != self._taken:
            logger.error("%s; the %d API keys read before stay valid", problem, len(self.ring))
        self._taken = self._seen = stamp

    def _read(self) -> KeyRing:
        try:
            text = self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: not UTF-8: {error.reason}", "api_key_file") from error
        entries = parse_keys(text, str(self._path))
        return KeyRing([*self._more, *entries])

    def _stamp(self) -> Stamp:
        state = self._path.stat()
        return (state.st_mtime_ns, state.st_size, state.st_ino)
