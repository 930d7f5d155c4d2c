"""How a deployment of Serve finds all copies of another: by leases, calls that a copy answers while it lives.

Who wants them keeps one lease call pending. Serve's request router (in the caller's own process) holds it back until
a copy exists that the caller does not know, and sends it there; the stream that answers is the caller's lease on that
copy. Serve waits for open streams when it stops a copy, and breaks them when the copy dies, so a lease is also how
the caller hears of both. Public Ray API: `ray.serve.request_router`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import ray
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.tasks import is_cancelled

RETRY_SECONDS = 0.25
LEASE_PATIENCE = 5.0  # seconds; a copy that has stopped may have been asked, and another have come since
LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)


class ReplicaWatch:
    """A caller's view of the set of copies, handed by reference to the request router in the same process.

    `known` holds the ids of replicas that are leased or not wanted now. `on_members` is called on `loop` with all
    running ids whenever Serve changes the set. Sent to a replica it becomes None: it has no meaning elsewhere.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_members: Callable[[frozenset[str]], None]) -> None:
        self.known: set[str] = set()
        self._loop = loop
        self._on_members = on_members

    def members_changed(self, ids: frozenset[str]) -> None:
        """Tell the router, from the request router's thread. Dropped once the router's loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_members, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class LeaseRequestRouter(RequestRouter):
    """Serve's request router for the replica deployment: sends each lease call to a replica its caller lacks."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Start without watchers (called by Serve)."""
        self._watches: list[ReplicaWatch] = []
        self._recheck = asyncio.Event()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas unknown to the caller, waiting until there is one; any replica for other calls."""
        # No isinstance: Serve may copy this class by value, and its globals are then not the caller's.
        watch: ReplicaWatch | None = pending_request.kwargs.get("watch") if pending_request else None
        if pending_request is None or watch is None:
            return [candidate_replicas]
        if watch not in self._watches:
            self._watches.append(watch)
            watch.members_changed(self._ids())
        while not pending_request.future.done():
            self._recheck.clear()
            fresh = [r for r in self.curr_replicas.values() if r.replica_id.unique_id not in watch.known]
            if fresh:
                return [fresh]
            await self._wait_for_change()
        # The call was given up, perhaps while a replica was being asked. Serve notices when it is given candidates,
        # and only then: with none it would ask again at once, for ever, and its loop would do nothing else.
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the new set from Serve's controller and pass it on to the watchers."""
        super().update_replicas(replicas)
        self._recheck.set()
        for watch in self._watches:
            watch.members_changed(self._ids())

    async def _wait_for_change(self) -> None:
        # A watch forgets a replica whose link broke without Serve changing the set: look again now and then.
        try:
            await asyncio.wait_for(self._recheck.wait(), timeout=0.25)
        except TimeoutError:
            return

    def _ids(self) -> frozenset[str]:
        return frozenset(replica_id.unique_id for replica_id in self.curr_replicas)


async def next_lease(call: Callable[[], Any], patience: float) -> tuple[Any, Any] | None:
    """Make a lease call; return what a copy announces, and the lease, or None after a pause where none did in time.

    patience: seconds.
    """
    lease = call()
    try:
        async with asyncio.timeout(patience):
            return await anext(lease), lease
    except (Exception, asyncio.CancelledError) as error:
        if is_cancelled():
            raise
        # Whatever Serve raises here (a copy that is gone, an app being deployed) is over by itself: ask again. It
        # also cancels a call on its way to a copy that died, which looks like the end of this task.
        logger.debug("no lease: %r", error)
        lease.cancel()
        await asyncio.sleep(RETRY_SECONDS)
        return None


async def either(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when the first of `waits` does, or raise what it raised, and give up the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def lease_ended(lease: Any) -> None:
    """Return when the copy ends the lease or dies."""
    try:
        async for _ in lease:
            pass
    except Exception as error:
        logger.info("lease over: %s", type(error).__name__)


def listening_host(chosen: str | None, nodes: Iterable[str]) -> str:
    """Return where this process listens for peers on `nodes`: as chosen, else loopback if all are on its own."""
    if chosen is not None:
        return chosen
    here = ray.get_runtime_context().get_node_id()
    return LOOPBACK if all(node == here for node in nodes) else str(ray.util.get_node_ip_address())
