"""What the routes of files and batches share: the store, threads for its files, a bound on what goes out to clients.

Without `--batch-dir` there is no store, and all routes say so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import json
from starlette.types import Receive, Scope

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.admission.keys import Tenant
from cluster.batch.server.store import Store
from cluster.errors import ApiError
from cluster.http.asgi import Answer
from cluster.http.endpoints import Responder

FILE_THREADS = 8
MOST_BYTES = 512 << 20  # of files on their way to clients; tenants have equal shares of it
RETRY_AFTER = 5  # seconds
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """One request of a route. `id`: of the file or batch that its path names, "" without; not checked."""

    scope: Scope
    receive: Receive
    answer: Answer

    @property
    def tenant(self) -> str:
        """Who asks."""
        tenant: Tenant = self.scope["state"]["tenant"]
        return tenant.name

    @property
    def most_stored(self) -> int | None:
        """Bytes that files of who asks may take, None = any number."""
        tenant: Tenant = self.scope["state"]["tenant"]
        return tenant.quota.max_stored_bytes

    @property
    def deadline(self) -> float | None:
        """When a POST must end, on the event loop's clock."""
        deadline: float | None = self.scope["state"]["visit"].deadline
        return deadline

    @property
    def id(self) -> str:
        """As the path spells it."""
        found: str = self.scope["path_params"].get("id", "")
        return found

    async def reply(self, body: Any) -> None:
        """Answer with JSON."""
        await self.answer.json(200, json.encode(body))


@dataclass(slots=True)
class _TenantThreads:
    """The threads that one tenant may have at a time. users: who have one, or wait for it."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(FILE_THREADS // 2))
    users: int = 0


class FileThreads:
    """Threads that read and write files, so that a slow disk delays only the requests that use it.

    One tenant has half of them at most, so that many requests of one tenant delay only that tenant.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=FILE_THREADS, thread_name_prefix="files")
        self._shares: dict[str, _TenantThreads] = {}

    async def run(self, work: Callable[[], T], tenant: str) -> T:
        """Return what `work` returns; raises `ApiError` where it raises `OSError`.

        Who is cancelled still waits for its end: no two threads are at one file.
        """
        share = self._shares.setdefault(tenant, _TenantThreads())
        share.users += 1
        try:
            async with share.free:
                return await self._run(work)
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[tenant]

    async def _run(self, work: Callable[[], T]) -> T:
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


@dataclass(frozen=True, slots=True)
class Stored:
    """What the routes share. store: None = nothing is kept."""

    store: Store | None
    threads: FileThreads = field(default_factory=FileThreads)

    async def run(self, tenant: str, work: Callable[[Store], T]) -> T:
        """Return what `work` makes of the store, in a thread. Raises `ApiError`, also where nothing is kept.

        tenant: who asks.
        """
        store = self.opened()
        return await self.threads.run(lambda: work(store), tenant)

    def opened(self) -> Store:
        """Return the store; raises `ApiError` where nothing is kept."""
        if self.store is None:
            raise ApiError(
                "batches_not_enabled",
                "this server keeps no files and batches; start it with --batch-dir, a directory or a URL for them",
                status=404,
            )
        return self.store


Act = Callable[[StorageRequest], Awaitable[None]]


class ByMethod(Responder):
    """One path: what each of its methods does."""

    def __init__(self, stored: Stored, acts: Mapping[str, Act]) -> None:
        self._stored = stored
        self._acts = acts

    async def _respond(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        self._stored.opened()
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._acts[method](StorageRequest(scope, receive, answer))


class UnderWay:
    """Bytes of files that go out to clients. Of one event loop. most: bytes; something larger goes alone.

    They are bounded where nothing else bounds what Ray Serve holds of them: behind a proxy that is not guarded it
    takes all it is given, however slowly a client reads.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._bytes = TenantBytes(most)

    @contextmanager
    def sending(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` bytes until their client has them. Raises `ApiError` (429) when too many are under way."""
        if self._bytes.num_bytes and not self._bytes.make_room(tenant, size):
            most = f"of {self._bytes.most >> 20} MiB, which tenants share"
            message = f"as much of this tenant's files is on its way to clients as may be ({most}); try again later"
            raise ApiError("overloaded", message, status=429, retry_after=RETRY_AFTER)
        self._bytes.take(tenant, size)
        try:
            yield
        finally:
            self._bytes.give_back(tenant, size)
