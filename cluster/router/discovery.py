"""How routers learn of replicas: a lease call that Serve delivers to a replica not yet known.

A router keeps one lease call pending. Serve's request router (in the router's own process) holds it back until a
replica exists that the caller does not know, and sends it there; the stream that answers is the router's lease on
that replica. Serve waits for open streams when it stops a replica, and breaks them when the replica dies, so a lease
is also how a router hears of both. Public Ray API: `ray.serve.request_router` (FACTS, "Ray Serve").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaWatch:
    """A router's view of the replica set, handed by reference to the request router in the same process.

    `known` holds the ids of replicas that are leased or not wanted now. `on_members` is called on `loop` with all
    running ids whenever Serve changes the set. Sent to a replica it becomes None: it has no meaning elsewhere.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_members: Callable[[frozenset[str]], None]) -> None:
        self.known: set[str] = set()
        self._loop = loop
        self._on_members = on_members

    def members_changed(self, ids: frozenset[str]) -> None:
        """Tell the router, from the request router's thread. Nobody listens any more once its loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_members, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class LeaseRequestRouter(RequestRouter):
    """Serve's request router for the replica deployment: sends each lease call to a replica its caller lacks."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Start with nobody watching (called by Serve)."""
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
        """Take the new set from Serve's controller and pass it on to whoever watches."""
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
