"""Work that a long request makes, kept away from the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")
LONG_BODY = 16_384  # bytes from which on checking and tokenizing take milliseconds: worth a thread


class OffLoop:
    """Two threads for what is too long for the loop; the rest is done at once."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` returns for a request of `num_bytes`."""
        if num_bytes < LONG_BODY:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class FileThreads:
    """Threads that read and write files, so that a slow disk holds up nobody but who waits for it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="files")

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; raises `ApiError` where it raises `OSError`.

        Who is cancelled still waits for its end: no two threads are at one file.
        """
        task = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
        except OSError as error:
            log.exception("a file cannot be read or written")
            raise _storage_error(error) from error

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _storage_error(error: OSError) -> ApiError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError("out_of_storage", "the server has no room for more; delete files and try again", status=507)
    return ApiError("storage_failed", "the server's --batch-dir cannot be read or written; try again", status=503)
