"""Threads for the work that a long request makes, kept away from the event loop and shared fairly by tenants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.errors import ApiError

T = TypeVar("T")
THREADS = 3
MAX_WAITING = 256 * 2**20  # bytes of one tenant's requests that wait for a thread
LONG_BODY = 16_384  # bytes from which on checking and tokenizing take milliseconds: worth a thread


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    came: asyncio.Future[None]
    num_bytes: int


@dataclass(slots=True)
class _TenantQueue:
    """What one tenant has to do. waiting: done when their turn has come. num_bytes: of the requests that wait."""

    waiting: deque[_Turn] = field(default_factory=deque)
    num_bytes: int = 0
    running: int = 0

    def next(self) -> _Turn | None:
        """Return the task that waits longest, None where none does."""
        while self.waiting and self.waiting[0].came.cancelled():
            self.leave(self.waiting[0])
        return self.waiting[0] if self.waiting else None

    def leave(self, turn: _Turn) -> None:
        """Take a turn off the line."""
        self.waiting.remove(turn)
        self.num_bytes -= turn.num_bytes


class FairThreadPool:
    """A few threads for what is too long for the loop; the rest is done at once.

    Tenants take turns. One has fewer threads than there are, so that another need not wait for its work to end.

    max_waiting: bytes of one tenant's requests that may wait.
    """

    def __init__(self, threads: int = THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenize")
        self._free = threads
        self._most = max(threads - 1, 1)
        self._max_waiting = max_waiting
        self._lines: dict[str, _TenantQueue] = {}  # by tenant; the first one's turn is next

    async def run(self, num_bytes: int, work: Callable[[], T], tenant: str = "") -> T:
        """Return what `work` returns for a request of `num_bytes`; raises `ApiError` where too many of them wait."""
        if num_bytes < LONG_BODY:
            return work()
        loop = asyncio.get_running_loop()
        await self._turn(num_bytes, tenant, loop)
        task = self._threads.submit(work)  # which goes on in its thread if its request is cancelled
        task.add_done_callback(lambda _: self._ended(tenant, loop))
        return await asyncio.wrap_future(task)

    async def _turn(self, num_bytes: int, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a thread, which then is the caller's."""
        line = self._lines.setdefault(tenant, _TenantQueue())
        if line.num_bytes + num_bytes > self._max_waiting and line.waiting:
            raise ApiError("overloaded", "too many long requests wait to be read; send it again in a moment")
        turn = _Turn(loop.create_future(), num_bytes)
        line.waiting.append(turn)
        line.num_bytes += num_bytes
        self._give()
        try:
            await turn.came
        except asyncio.CancelledError:
            if not turn.came.cancelled():
                self._release(tenant)
            elif turn in line.waiting:
                line.leave(turn)
            self._forget(tenant)
            raise

    def _give(self) -> None:
        """Give threads that are free to those whose turn it is."""
        while self._free:
            due = ((one, line.next()) for one, line in self._lines.items() if line.running < self._most)
            tenant, turn = next(((one, turn) for one, turn in due if turn is not None), ("", None))
            if turn is None:
                return
            line = self._lines.pop(tenant)
            self._lines[tenant] = line  # behind the others
            line.leave(turn)
            line.running += 1
            self._free -= 1
            turn.came.set_result(None)

    def _ended(self, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the thread."""
        try:
            loop.call_soon_threadsafe(self._release, tenant)
        except RuntimeError:  # the loop is closed
            self._release(tenant)

    def _release(self, tenant: str) -> None:
        line = self._lines[tenant]
        line.running -= 1
        self._free += 1
        self._forget(tenant)
        self._give()

    def _forget(self, tenant: str) -> None:
        line = self._lines.get(tenant)
        if line is not None and not line.running and not line.waiting:
            del self._lines[tenant]

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
