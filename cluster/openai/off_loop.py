"""Work that a long request makes, kept away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
